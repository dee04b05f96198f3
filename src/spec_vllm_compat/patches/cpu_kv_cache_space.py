"""``VLLM_CPU_KVCACHE_SPACE`` bounds the KV cache on CPU."""

from __future__ import annotations

import os
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="cpu_kv_cache_space",
    kind=Kind.PLATFORM,
    why=(
        "speculators takes a share of the free memory for the KV cache. On a CPU machine that is everybody's memory, and "
        "vLLM's own way to say how much of it is meant for the cache is this variable, in GiB."
    ),
    changed="not a change: vLLM's CPU worker reads the variable when it sizes the cache itself; speculators never asks it to",
    source="vllm/envs.py `VLLM_CPU_KVCACHE_SPACE`; vllm/platforms/cpu.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="at start-up: the variable and vLLM's platform",
    remove_when="never while machines without a GPU are supported",
)

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def _probe(_target: Target) -> Probe:
    return Probe(True, f"{VARIABLE}={os.environ.get(VARIABLE, 'not set')}")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    space = float(os.environ.get(VARIABLE) or 0)  # 0 means "not set", as in vLLM
    if space <= 0:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keywords["available_memory"] = min(keywords["available_memory"], int(space * 2**30))


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("get_kv_cache_config_from_groups", "available_memory", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
