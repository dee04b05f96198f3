"""``get_kv_cache_config_from_groups`` lost its parameter ``kv_cache_specs``."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="kv_cache_specs",
    kind=Kind.UPSTREAM,
    why="speculators 0.3 passes it: «get_kv_cache_config_from_groups() got an unexpected keyword argument».",
    changed="vLLM 0.12.0 removed the parameter; the specs are read from the groups.",
    source="vllm/v1/core/kv_cache_utils.py in 0.11.2 and 0.12.0",
    vllm=">=0.12",
    speculators=">=0.3,<0.4",
    probed_by="the parameters of get_kv_cache_config_from_groups, and whether the constants of speculators name it",
    remove_when="speculators 0.3 is no longer supported (0.4 does not pass it)",
)


def _probe(target: Target) -> Probe:
    if "kv_cache_specs" in target.parameters("get_kv_cache_config_from_groups"):
        return Probe(False, "the parameter is there")
    passed = target.passes("__init__", "kv_cache_specs")
    return Probe(passed, "no such parameter, " + ("passed by speculators" if passed else "not passed by speculators"))


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords.pop("kv_cache_specs", None)


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("get_kv_cache_config_from_groups", "kv_cache_specs", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
