"""Prefix caching must be off: a cached token has no row."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="prefix_caching",
    kind=Kind.CORRECTNESS,
    why=(
        "The layers never run for tokens found in the prefix cache, so their rows do not exist. With the default and "
        "requests without block hashes, `schedule()` fails in `cache_full_blocks` («AssertionError», from 0.26.0 "
        "«IndexError»)."
    ),
    changed="vLLM 0.12.0 turned `CacheConfig.enable_prefix_caching` on by default.",
    source="vllm/config/cache.py, line 77 in 0.11.2, line 76 in 0.12.0",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether CacheConfig has `enable_prefix_caching`",
    remove_when="speculators 0.3 is no longer supported (0.4 turns it off)",
)


def _probe(target: Target) -> Probe:
    parameter = target.parameters("CacheConfig").get("enable_prefix_caching")
    if parameter is None:
        raise SeamMissing("CacheConfig(enable_prefix_caching=)", "no such keyword")
    return Probe(True, f"CacheConfig.enable_prefix_caching is {parameter.default} by default")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords["enable_prefix_caching"] = False


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("CacheConfig", "enable_prefix_caching", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
