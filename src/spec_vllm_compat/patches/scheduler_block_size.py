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
        "speculators 0.4 passes the constant 16, whatever block size the workers chose: from vLLM 0.23 on an "
        "AssertionError in the KV cache coordinator."
    ),
    changed=(
        "vLLM 0.11.1 added the required parameter (0.11.0 read it from the cache configuration). From 0.18.0 the workers "
        "choose the size in their own copy of the configuration, and the engine copies it back. 0.20.0 added "
        "`hash_block_size` and `resolve_kv_cache_block_sizes`, which gives both."
    ),
    source="vllm/v1/core/sched/scheduler.py, line 122 in 0.11.1; vllm/v1/engine/core.py, line 275 in 0.18.0, line 141 in 0.20.0",
    vllm=">=0.11.1",
    speculators=">=0.3,<0.5",
    probed_by="the parameters of Scheduler",
    remove_when="never while speculators' in-process generator is supported",
)


def _probe(target: Target) -> Probe:
    required = "block_size" in target.parameters("Scheduler")
    return Probe(required, "Scheduler takes a block size" if required else "Scheduler reads the block size itself")


def _measure(_target: Target, keywords: dict[str, Any]) -> None:
    vllm_config = keywords["vllm_config"]
    specs = [group.kv_cache_spec for group in keywords["kv_cache_config"].kv_cache_groups]
    # As the engine does: groups that cannot take part in prefix caching do not count, unless there are no others.
    specs = [spec for spec in specs if getattr(spec, "prefix_cacheable", True)] or specs
    if specs:
        vllm_config.cache_config.block_size = min(spec.block_size for spec in specs)
    keywords["block_size"] = vllm_config.cache_config.block_size


def _resolve(_target: Target, keywords: dict[str, Any]) -> None:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    both = resolve_kv_cache_block_sizes(keywords["kv_cache_config"], keywords["vllm_config"])
    keywords["block_size"], keywords["hash_block_size"] = both


def _changes(target: Target) -> tuple[Change, ...]:
    measured = Keyword("Scheduler", "block_size", _measure)
    if "hash_block_size" not in target.parameters("Scheduler"):
        return (measured,)
    return (measured, Keyword("Scheduler", "hash_block_size", _resolve))


PATCH_SET = PatchSet(RECORD, _probe, _changes)
