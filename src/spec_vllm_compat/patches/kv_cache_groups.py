"""speculators puts all layers into one KV cache group; vLLM's own planning does it right."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, Name, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="kv_cache_groups",
    kind=Kind.UPSTREAM,
    why=(
        "speculators puts every layer into one group, and before that turns sliding-window layers into full ones. Models "
        "that mix kinds of layers cannot be represented so: «Hybrid KV cache manager is disabled but failed to convert the "
        "KV cache specs to one unified type», or blocks of the wrong size. vLLM's `get_kv_cache_groups` gives the same "
        "single group where one is enough and the right ones where it is not."
    ),
    changed="not a change: vLLM plans so since 0.11.0; more and more models have several kinds of layers",
    source="vllm/v1/core/kv_cache_utils.py `get_kv_cache_groups`; since 0.33.0 in kv_cache_planning.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether the module of get_kv_cache_config_from_groups has `get_kv_cache_groups(vllm_config, kv_cache_spec)`",
    remove_when="never while speculators' in-process generator is supported",
)


def _planning(target: Target) -> ModuleType:
    return importlib.import_module(target.bound("get_kv_cache_config_from_groups").__module__)


def _probe(target: Target) -> Probe:
    for name in ("unify_hybrid_kv_cache_specs", "_get_kv_cache_groups_uniform_spec"):
        target.bound(name)
    planning = _planning(target)
    function = getattr(planning, "get_kv_cache_groups", None)
    found = tuple(inspect.signature(function).parameters) if function else None
    if found != ("vllm_config", "kv_cache_spec"):
        raise SeamMissing(f"{planning.__name__}.get_kv_cache_groups(vllm_config, kv_cache_spec)", str(found or "none"))
    return Probe(True, f"layers are grouped by {planning.__name__}")


def _changes(target: Target) -> tuple[Change, ...]:
    group = _planning(target).get_kv_cache_groups  # now: later the name may be bound to an adapter

    def plan(_target: Target, keywords: dict[str, Any]) -> None:
        specs, vllm_config = (
            keywords["kv_cache_groups"],
            keywords["vllm_config"],
        )  # the names below let the specs through
        if any(getattr(spec, "non_causal", False) for spec in specs.values()):  # as the engine does, since 0.24
            vllm_config.scheduler_config.enable_chunked_prefill = False
        keywords["kv_cache_groups"] = group(vllm_config, specs)

    return (
        Name("unify_hybrid_kv_cache_specs", lambda _target: lambda _kv_cache_spec: None),
        Name("_get_kv_cache_groups_uniform_spec", lambda _target: lambda kv_cache_spec: kv_cache_spec),
        Keyword("get_kv_cache_config_from_groups", "kv_cache_groups", plan),
    )


PATCH_SET = PatchSet(RECORD, _probe, _changes)
