"""speculators 0.4 returns results in the string order of request ids."""

from __future__ import annotations

import builtins
import re
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Name, PatchSet, Probe, Target

RECORD = Record(
    id="result_order",
    kind=Kind.CORRECTNESS,
    why=(
        "speculators 0.4 walks its results with `sorted(request ids)`: as strings, req_0_10 comes before req_0_2, so from "
        "11 sequences on its own script pairs hidden states with other sequences' loss masks. Nothing fails."
    ),
    changed="speculators 0.4.0 (0.3.0 kept the order); repaired upstream for a later extraction path only (349).",
    source="speculators 0.4.0 vllm_hidden_states_generator.py, `sorted(request_id_to_idx.keys())`",
    vllm=">=0.11",
    speculators=">=0.4,<0.5",
    probed_by="whether `generate` calls `sorted`",
    remove_when="speculators 0.4 is no longer supported",
)

_NUMBER = re.compile(r"(\d+)")


def _by_number(text: Any) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(text)]


def _sorted(iterable: Any, *, key: Any = None, reverse: bool = False) -> list[Any]:
    """``sorted`` that reads the numbers in strings as numbers: req_0_2 comes before req_0_10."""
    values = list(iterable)
    if key is None and all(isinstance(value, str) for value in values):
        key = _by_number
    return builtins.sorted(values, key=key, reverse=reverse)


def _probe(target: Target) -> Probe:
    generate = vars(target.bound("VllmHiddenStatesGenerator"))["generate"]
    sorts = "sorted" in generate.__code__.co_names
    return Probe(sorts, "generate() sorts request ids" if sorts else "generate() keeps the order of the input")


def _changes(_target: Target) -> tuple[Change, ...]:
    # A module-level name hides the builtin from this module alone.
    return (Name("sorted", lambda _target: _sorted),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
