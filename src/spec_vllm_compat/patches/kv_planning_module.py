"""Planning functions moved out of ``vllm.v1.core.kv_cache_utils``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Completion, PatchSet, Probe, Target

RECORD = Record(
    id="kv_planning_module",
    kind=Kind.UPSTREAM,
    why=(
        "The generator cannot be imported: «cannot import name '_get_kv_cache_groups_uniform_spec' from "
        "'vllm.v1.core.kv_cache_utils'»."
    ),
    changed="vLLM 0.33.0 moved the planning functions to `vllm.v1.core.kv_cache_planning` and left no alias.",
    source="vllm/v1/core/kv_cache_planning.py, line 642 in 0.33.0",
    vllm=">=0.33",
    speculators=">=0.3,<0.5",
    probed_by="in which module get_kv_cache_config_from_groups is defined",
    remove_when="never while speculators' in-process generator is supported",
)

OLD, NEW = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
NAMES = ("_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs")


def _missing(module: ModuleType) -> Mapping[str, Any]:
    if any(hasattr(module, name) for name in NAMES) or importlib.util.find_spec(NEW) is None:
        return {}

    def moved(name: str) -> Any:
        # Looked up when asked for: the new module imports the old one and may be half imported now.
        if name in NAMES:
            return getattr(importlib.import_module(NEW), name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return {"__getattr__": moved}


def _probe(target: Target) -> Probe:
    where = target.bound("get_kv_cache_config_from_groups").__module__
    return Probe(where == NEW, f"planning functions are in {where}")


PATCH_SET = PatchSet(RECORD, _probe, lambda _target: (), completes=(Completion(OLD, _missing),))
