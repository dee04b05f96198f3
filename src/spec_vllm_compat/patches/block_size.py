"""The size of a KV cache block is the platform's choice; speculators orders 16 tokens."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="block_size",
    kind=Kind.UPSTREAM,
    why=(
        "speculators demands blocks of 16 tokens, and vLLM takes an explicit size as an order. Attention backends that "
        "want another one refuse it when the workers start: CPU attention wants a multiple of 32 in newer builds, MLA "
        "backends on GPU 64 or 128. Left out, the platform and the workers choose what their kernels can do."
    ),
    changed=(
        "up to vLLM 0.17 the platform corrects the size in the driver, an explicit one too; from 0.18.0 the worker chooses "
        "it and keeps one that `CacheConfig.user_specified_block_size` says was given. 0.29.0: CPU attention refuses 16."
    ),
    source="vllm/platforms/interface.py `update_block_size_for_backend`, line 482 in 0.20.0; vllm/platforms/cuda.py, line 247 in 0.17.0",
    vllm=">=0.18",
    speculators=">=0.3,<0.5",
    probed_by="whether CacheConfig has the field `user_specified_block_size`, and a default for `block_size`",
    remove_when="never while speculators' in-process generator is supported",
)


def _probe(target: Target) -> Probe:
    parameter = target.parameters("CacheConfig").get("block_size")
    if parameter is None or parameter.default is parameter.empty:
        raise SeamMissing("CacheConfig(block_size=) with a default", "no such keyword" if parameter is None else "none")
    if "user_specified_block_size" not in getattr(target.bound("CacheConfig"), "__dataclass_fields__", {}):
        return Probe(False, "the platform corrects an explicit block size")
    return Probe(True, "an explicit block size is kept, whatever the workers can do")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords.pop("block_size", None)


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("CacheConfig", "block_size", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
