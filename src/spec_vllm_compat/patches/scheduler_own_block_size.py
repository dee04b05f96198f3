"""In 0.11.0 ``Scheduler`` reads the block size from the cache configuration."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="scheduler_own_block_size",
    kind=Kind.UPSTREAM,
    why="speculators 0.4 passes it: «Scheduler.__init__() got an unexpected keyword argument 'block_size'».",
    changed="vLLM 0.11.1 added the parameter, and speculators 0.4 was written for 0.12.",
    source="vllm/v1/core/sched/scheduler.py, line 103 in 0.11.0, line 122 in 0.11.1",
    vllm="<0.11.1",
    speculators=">=0.4,<0.5",
    probed_by="the parameters of Scheduler, and whether the constants of speculators name it",
    remove_when="vLLM 0.11.0 is no longer supported",
)


def _probe(target: Target) -> Probe:
    if "block_size" in target.parameters("Scheduler"):
        return Probe(False, "Scheduler takes a block size")
    passed = target.passes("__init__", "block_size")
    return Probe(passed, "no such parameter, " + ("passed by speculators" if passed else "not passed by speculators"))


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords.pop("block_size", None)


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("Scheduler", "block_size", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
