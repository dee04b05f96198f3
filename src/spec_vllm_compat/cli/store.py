"""Samples on disk, in the form that speculators' trainer reads. A file is there whole or not at all.

::

    DIR/rows_0-2000/data_0.pt ...      one sample: input_ids, hidden_states, loss_mask
    DIR/data_config.json               written by speculators' own DataGenerationConfig
    DIR/sample_lengths.json            speculators 0.4: sample number to length; linked into every rows_A-B
    DIR/manifest.json                  ours: what was asked, with what, what came of it (one a shard)

The trainer takes every file below DIR whose name ends in ``pt`` for a sample, so no other name may.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_vllm_compat.errors import CompatError

_NAME = re.compile(r"^data_(\d+)\.pt$")


@dataclass(frozen=True)
class Layout:
    """Where sample N lies: ``rows_A-B/data_N.pt`` with A <= N < B, or flat when ``shard_size`` is 0."""

    root: Path
    shard_size: int

    def path(self, number: int) -> Path:
        if not self.shard_size:
            return self.root / f"data_{number}.pt"
        first = number - number % self.shard_size
        return self.root / f"rows_{first}-{first + self.shard_size}" / f"data_{number}.pt"


def find_samples(root: Path) -> tuple[dict[int, list[Path]], list[Path]]:
    """Sample number to files of that number, and the other files that the trainer would take for samples."""
    samples: dict[int, list[Path]] = {}
    strays = []
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            if match := _NAME.match(name):
                samples.setdefault(int(match[1]), []).append(Path(folder, name))
            elif name.endswith("pt"):
                strays.append(Path(folder, name))
    return dict(sorted(samples.items())), strays


def write_sample(path: Path, sample: dict[Any, Any]) -> int:
    """Write a sample for ``torch.load``, as :func:`publish` does."""
    return publish(path, lambda part: torch.save(sample, part))


def publish(path: Path, write: Callable[[Path], Any]) -> int:
    """Write a file so that a kill or a power cut at any moment leaves the old state or the new one. Returns bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        _sync(part)
        size = part.stat().st_size
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


def write_json(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    _sync(part)
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """The value, or None when there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CompatError(f"{path}: expected JSON; found {error}. Move the file away and start again.") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(layout: Layout, numbers: Sequence[int]) -> None:
    """Remove what a killed run left half written."""
    folders = {layout.path(number).parent for number in numbers}
    ours = {f".{layout.path(number).name}.part" for number in numbers}
    for folder in folders:
        for part in folder.glob(".data_*.part"):
            if part.name in ours:
                part.unlink(missing_ok=True)


def link_lengths(layout: Layout, folder: Path) -> None:
    """The trainer of speculators 0.4 looks for ``sample_lengths.json`` beside the first sample it happens to list."""
    link = folder / "sample_lengths.json"
    if folder == layout.root or link.exists():
        return
    with contextlib.suppress(FileExistsError):
        try:
            link.symlink_to("../sample_lengths.json")
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            write_json(link, read_json(layout.root / "sample_lengths.json"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock for the block; it ends with the process, however that ends.

    Raises:
        CompatError: another process holds it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompatError(
                f"another extract is writing this part of {path.parent}. Wait for it, or give each a --shard-index."
            ) from None
        except OSError:  # a network file system without locks
            pass
        yield


@dataclass(frozen=True)
class Expected:
    """What a sample must be; None where nothing is known."""

    input_ids: Sequence[int] | None = None
    loss_mask: Sequence[int] | None = None
    layers: int | None = None
    hidden_size: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Checked:
    """A sample as found. ``problems`` is a list of (kind, sentence)."""

    problems: list[tuple[str, str]]
    sample: dict[str, Any] | None = None


def check_sample(path: Path, expected: Expected, *, values: bool) -> Checked:  # noqa: PLR0912
    """Look at one file; ``values`` reads every row too, else only ids, mask and shapes are read."""
    try:
        sample = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - torch raises many types for a damaged file
        return Checked([("unreadable", f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0]:.80})")])
    problems: list[tuple[str, str]] = []
    if not isinstance(sample, dict) or not {"input_ids", "hidden_states", "loss_mask"} <= set(sample):
        keys = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        return Checked([("format", f"expected input_ids, hidden_states, loss_mask; found {keys}")])
    ids, mask, states = sample["input_ids"], sample["loss_mask"], sample["hidden_states"]
    if not _is_vector(ids) or not len(ids):
        return Checked([("format", "input_ids is not a 1-dimensional integer tensor with at least one token")])
    if (
        not isinstance(states, list)
        or not states
        or not all(isinstance(s, torch.Tensor) and s.dim() == 2 for s in states)
    ):
        return Checked([("format", "hidden_states is not a list of 2-dimensional tensors")])
    if not _is_vector(mask):
        problems.append(("format", f"loss_mask is {type(mask).__name__}, not a 1-dimensional integer tensor"))
    elif len(mask) != len(ids):
        problems.append(("mask", f"loss_mask of {len(mask)} for {len(ids)} tokens"))
    elif expected.loss_mask is not None and mask.tolist() != list(expected.loss_mask):
        problems.append(("mask", "loss_mask is not that of the prepared data"))
    if expected.input_ids is not None and ids.tolist() != list(expected.input_ids):
        problems.append(("ids", "input_ids are not those of the prepared data"))
    if expected.layers is not None and len(states) != expected.layers:
        problems.append(("layers", f"{len(states)} layers, {expected.layers} asked for"))
    short = [len(rows) for rows in states if len(rows) != len(ids)]
    if short:
        problems.append(("rows", f"{short[0]} rows for {len(ids)} tokens"))
    widths, dtypes = {rows.shape[1] for rows in states}, {str(rows.dtype).removeprefix("torch.") for rows in states}
    if len(widths) > 1 or (expected.hidden_size is not None and widths != {expected.hidden_size}):
        problems.append(("width", f"rows of width {sorted(widths)}, expected {expected.hidden_size or 'one width'}"))
    if len(dtypes) > 1 or (expected.dtype is not None and dtypes != {expected.dtype}):
        problems.append(("dtype", f"rows of {sorted(dtypes)}, expected {expected.dtype or 'one dtype'}"))
    if values:
        problems += _look_at_values(states)
    return Checked(problems, sample)


def sound_sample(path: Path, expected: Expected, *, values: bool = False) -> dict[str, Any]:
    """The sample, or CompatError with the first thing that :func:`check_sample` finds wrong."""
    checked = check_sample(path, expected, values=values)
    if checked.problems or checked.sample is None:
        raise CompatError(f"{path}: {checked.problems[0][1]}. `spec-vllm-compat verify` on the folder says more.")
    return checked.sample


def _look_at_values(states: list[torch.Tensor]) -> list[tuple[str, str]]:
    for index, rows in enumerate(states):
        if not rows.numel():
            continue
        peaks = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1)
        bad = (~torch.isfinite(peaks)).nonzero()
        if len(bad):
            return [("finite", f"tensor {index}, row {int(bad[0])} holds NaN or infinite values")]
        zero = (peaks == 0).nonzero()
        if len(zero):
            return [("zero", f"tensor {index}, row {int(zero[0])}: every value is zero")]
    return []


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_floating_point()
