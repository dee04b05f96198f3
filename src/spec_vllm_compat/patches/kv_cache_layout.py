"""The memory layout of the KV cache is agreed on with the workers before the cache is planned."""

from __future__ import annotations

import inspect
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="kv_cache_layout",
    kind=Kind.UPSTREAM,
    why="The KV cache cannot be planned: «KV cache layout has not been resolved yet».",
    changed=(
        "vLLM 0.29.0 lets the engine choose one layout from those that all workers support, before planning; 0.33.0 sends "
        "the interleave size of context parallelism along."
    ),
    source="vllm/v1/engine/core.py `_initialize_kv_caches`, line 289 in 0.29.0, line 286 in 0.33.0",
    vllm=">=0.29",
    speculators=">=0.3,<0.5",
    probed_by="whether the executor has `set_kv_cache_layout`",
    remove_when="never while speculators' in-process generator is supported",
)

_INTERLEAVE = "cp_kv_cache_interleave_size"


class KVCacheLayout:
    """Resolves the layout as soon as the workers are there."""

    def workers_ready(self) -> None:
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        executor: Any = self
        specs = [spec for worker in executor.get_kv_cache_specs() for spec in worker.values()]
        layout = resolve_kv_cache_layout(executor.vllm_config, executor.get_supported_kv_cache_layouts(), specs)
        more = {}
        if _INTERLEAVE in inspect.signature(executor.set_kv_cache_layout).parameters:
            # The engine adjusts it for decode context parallelism with a KV connector; the generator has neither.
            more[_INTERLEAVE] = getattr(executor.vllm_config.parallel_config, _INTERLEAVE)
        executor.set_kv_cache_layout(layout.name, **more)


def _probe(target: Target) -> Probe:
    executor = target.bound("MultiprocExecutor")
    if not hasattr(executor, "set_kv_cache_layout"):
        return Probe(False, "this vLLM has one layout")
    known = {"self", "layout_name", _INTERLEAVE}
    unknown = set(inspect.signature(executor.set_kv_cache_layout).parameters) - known
    if unknown or not hasattr(executor, "get_supported_kv_cache_layouts"):
        found = (
            f"set_kv_cache_layout with {sorted(unknown)} besides" if unknown else "no get_supported_kv_cache_layouts"
        )
        raise SeamMissing(
            "MultiprocExecutor.get_supported_kv_cache_layouts and set_kv_cache_layout(layout_name)", found
        )
    return Probe(True, "the layout has to be resolved before planning")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Members("MultiprocExecutor", KVCacheLayout),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
