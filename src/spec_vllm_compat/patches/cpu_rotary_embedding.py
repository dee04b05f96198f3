"""Rotary embedding on CPU for queries of several heads in three dimensions."""

from __future__ import annotations

import logging
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="cpu_rotary_embedding",
    kind=Kind.PLATFORM,
    why=(
        "vLLM's compiled operator for CPU takes the stride of the heads for that of the tokens when the query is given as "
        "`[tokens, heads, width]`: it rotates other numbers than it should, from several threads at once. Wrong rows, no "
        "error, and not the same twice. DeepSeek-V2 and V3 without yarn give it such queries (with `VLLM_MLA_DISABLE=1`, "
        "the only way on CPU). vLLM's own setting `custom_ops` takes its torch implementation instead."
    ),
    changed="a fault of vLLM's CPU build: in 0.16.0 and 0.32.0 (run); GPUs have other operators",
    source="csrc/cpu/pos_encoding.cpp; vllm/model_executor/models/deepseek_v2.py `DeepseekV2Attention.forward`",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="at start-up: vLLM's platform, and the operator itself with the same query in two and in three dimensions",
    remove_when="the operator of every supported CPU build rotates both alike",
)

logger = logging.getLogger("spec_vllm_compat")


def _operator_is_right() -> bool:
    import torch
    from vllm import _custom_ops

    flat, key = torch.arange(64.0).view(2, 32), torch.ones(2, 16)
    shaped = flat.clone().view(2, 2, 16)
    for query in (flat, shaped):  # rotated in place, by less and less
        _custom_ops.rotary_embedding(torch.arange(2), query, key.clone(), 16, torch.ones(2, 16) / 2, True)
    return bool(torch.equal(flat, shaped.view(2, 32)))


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _operator_is_right():
        return
    from vllm.config import CompilationConfig

    config = keywords.setdefault("compilation_config", CompilationConfig())
    config.custom_ops.append("-rotary_embedding")
    logger.info("vLLM's rotary embedding for CPU is not used: it is wrong for queries in three dimensions")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("VllmConfig", "compilation_config", _adapt),)


PATCH_SET = PatchSet(RECORD, lambda _target: Probe(True, "the operator is tried where vLLM runs on CPU"), _changes)
