"""Compiled operators of vLLM's CPU builds that compute wrong rows are not used."""

from __future__ import annotations

import logging
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="cpu_operators",
    kind=Kind.PLATFORM,
    why=(
        "Two operators of vLLM's CPU builds give wrong rows without an error. `rms_norm` ignores the strides of its input: "
        "every row of Qwen3 is wrong in 0.12 and 0.13, whose query and key norms see a part of a wider tensor. `rotary_embedding` takes the "
        "stride of the heads for that of the tokens when the query is `[tokens, heads, width]`: DeepSeek-V2 and V3 without "
        "yarn give it such queries (with `VLLM_MLA_DISABLE=1`, the only way on CPU). vLLM's own setting `custom_ops` takes "
        "its torch implementation instead."
    ),
    changed=(
        "faults of vLLM's CPU builds: rms_norm at least from 0.12.0 to 0.16.0, where the models themselves call it on CPU up to "
        "0.13 only; rotary_embedding in 0.16.0 and 0.32.0 (all run)"
    ),
    source="csrc/cpu/layernorm.cpp, csrc/cpu/pos_encoding.cpp; vllm/model_executor/models/qwen3.py, deepseek_v2.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="at start-up: vLLM's platform, and each operator with the same numbers in two forms",
    remove_when="both operators of every supported CPU build treat the two forms alike",
)

logger = logging.getLogger("spec_vllm_compat")


def rotary_embedding_is_right() -> bool:
    """Whether a query in three dimensions is rotated as the same query in two."""
    import torch
    from vllm import _custom_ops

    flat, key = torch.arange(64.0).view(2, 32), torch.ones(2, 16)
    shaped = flat.clone().view(2, 2, 16)
    for query in (flat, shaped):  # rotated in place, by less and less
        _custom_ops.rotary_embedding(torch.arange(2), query, key.clone(), 16, torch.ones(2, 16) / 2, True)
    return bool(torch.equal(flat, shaped.view(2, 32)))


def rms_norm_is_right() -> bool:
    """Whether a part of a wider tensor is normalised as its copy."""
    import torch
    from vllm import _custom_ops

    part = torch.arange(1.0, 193.0).view(2, 96)[:, :64].view(2, 2, 32)
    results = []
    for values in (part, part.contiguous()):
        results.append(torch.zeros(2, 2, 32))
        _custom_ops.rms_norm(results[-1], values, torch.ones(32), 1e-6)
    return bool(torch.allclose(*results))


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    trials = {"rms_norm": rms_norm_is_right, "rotary_embedding": rotary_embedding_is_right}
    wrong = [name for name, is_right in trials.items() if not is_right()]
    if not wrong:
        return
    from vllm.config import CompilationConfig

    config = keywords.setdefault("compilation_config", CompilationConfig())
    config.custom_ops += [f"-{name}" for name in wrong]
    logger.info("operators of vLLM for CPU that give wrong rows are not used: %s", ", ".join(wrong))


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("VllmConfig", "compilation_config", _adapt),)


PATCH_SET = PatchSet(RECORD, lambda _target: Probe(True, "operators are tried where vLLM runs on CPU"), _changes)
