"""``vllm.utils.hashing`` did not exist in 0.11.0."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Completion, PatchSet, Probe, Target

RECORD = Record(
    id="utils_hashing",
    kind=Kind.UPSTREAM,
    why="speculators 0.4 cannot be imported: «No module named 'vllm.utils.hashing'».",
    changed="vLLM 0.11.1 split `vllm.utils`; in 0.11.0 `get_hash_fn_by_name` is in the package itself.",
    source="vllm/utils/__init__.py in 0.11.0, vllm/utils/hashing.py in 0.11.1",
    vllm="<0.11.1",
    speculators=">=0.4,<0.5",
    probed_by="in which module get_hash_fn_by_name is defined",
    remove_when="vLLM 0.11.0 is no longer supported",
)

PACKAGE, NAME = "vllm.utils", "get_hash_fn_by_name"


def _missing(module: ModuleType) -> Mapping[str, Any]:
    if not hasattr(module, NAME) or importlib.util.find_spec(f"{PACKAGE}.hashing") is not None:
        return {}
    hashing = ModuleType(f"{PACKAGE}.hashing", f"Added by spec_vllm_compat: {RECORD.why}")
    setattr(hashing, NAME, getattr(module, NAME))
    return {"hashing": hashing}


def _probe(target: Target) -> Probe:
    if not target.binds(NAME):
        return Probe(False, "speculators does not hash blocks")
    where = target.bound(NAME).__module__
    return Probe(where == PACKAGE, f"{NAME} is in {where}")


PATCH_SET = PatchSet(RECORD, _probe, lambda _target: (), completes=(Completion(PACKAGE, _missing),))
