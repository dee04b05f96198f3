"""Up to 0.11.2 ``get_kv_cache_config_from_groups`` requires ``kv_cache_specs``."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="kv_cache_specs_required",
    kind=Kind.UPSTREAM,
    why=(
        "speculators 0.4 does not pass it: «get_kv_cache_config_from_groups() missing 1 required positional argument: "
        "'kv_cache_specs'»."
    ),
    changed="vLLM 0.12.0 removed the parameter, and speculators 0.4 was written for 0.12.",
    source="vllm/v1/core/kv_cache_utils.py in 0.11.2 and 0.12.0",
    vllm="<0.12",
    speculators=">=0.4,<0.5",
    probed_by="the parameters of get_kv_cache_config_from_groups, and whether the constants of speculators name it",
    remove_when="vLLM 0.11 is no longer supported",
)


def _probe(target: Target) -> Probe:
    if "kv_cache_specs" not in target.parameters("get_kv_cache_config_from_groups"):
        return Probe(False, "no such parameter")
    passed = target.passes("__init__", "kv_cache_specs")
    return Probe(not passed, "required, " + ("passed by speculators" if passed else "not passed by speculators"))


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    # Read from the groups, as vLLM itself does since 0.12; a group of unequal layers carries a spec for each.
    keywords["kv_cache_specs"] = {
        layer: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
        for group in keywords["kv_cache_groups"]
        for layer in group.layer_names
    }


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("get_kv_cache_config_from_groups", "kv_cache_specs", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
