"""``Scheduler`` requires the block size that the KV cache really has."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="scheduler_block_size",
    kind=Kind.UPSTREAM,
    why=(
        "speculators 0.3 does not pass it: «Scheduler.__init__() missing 1 required positional argument: 'block_size'». "
        "speculators 0.4 passes the constant 16, whatever block size the platform chose."
    ),
    changed="vLLM 0.11.1 added the required parameter; 0.11.0 read it from the cache configuration.",
    source="vllm/v1/core/sched/scheduler.py, line 122 in 0.11.1",
    vllm=">=0.11.1",
    speculators=">=0.3,<0.5",
    probed_by="the parameters of Scheduler",
    remove_when="never while speculators' in-process generator is supported",
)


def _probe(target: Target) -> Probe:
    required = "block_size" in target.parameters("Scheduler")
    return Probe(required, "Scheduler takes a block size" if required else "Scheduler reads the block size itself")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords["block_size"] = keywords["vllm_config"].cache_config.block_size


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("Scheduler", "block_size", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
