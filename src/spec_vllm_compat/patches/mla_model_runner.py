"""MLA models stay on model runner V1 where MLA on V2 computes wrong rows."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="mla_model_runner",
    kind=Kind.CORRECTNESS,
    why=(
        "MLA gives the earlier part of a prompt to the first tokens of a step, counted. Model runner V1 puts such prompts "
        "first; V2 sorts by length alone, so a new prompt can take the place of the rest of an older one, which is then "
        "computed without its beginning: wrong rows, no error. With MLA models V1 is chosen, unless "
        "`VLLM_USE_V2_MODEL_RUNNER` says otherwise; then every step is checked in the worker and a wrong one refused."
    ),
    changed="vLLM 0.20 to 0.27 count `prefill_tokens_with_context`; from 0.24 V2 is vLLM's own choice for DeepSeek-V2",
    source="vllm/model_executor/layers/attention/mla_attention.py; seen on an H200 with 0.23.0 (docs/evidence.md)",
    vllm=">=0.20,<0.28",
    speculators=">=0.3,<0.5",
    probed_by="whether vLLM's mla_attention.py has `prefill_tokens_with_context`",
    remove_when="vLLM 0.27 is not supported any more",
)

CHOICE = "VLLM_USE_V2_MODEL_RUNNER"
logger = logging.getLogger("spec_vllm_compat")


def _probe(_target: Target) -> Probe:
    vllm = find_spec("vllm")
    source = Path(vllm.origin or "") if vllm is not None else Path()
    source = source.with_name("model_executor") / "layers/attention/mla_attention.py"
    counts = source.exists() and "prefill_tokens_with_context" in source.read_text(encoding="utf-8")
    return Probe(counts, f"MLA {'counts' if counts else 'does not count'} the tokens of prompts with an earlier part")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    if not keywords["model_config"].use_mla:
        return
    chosen = os.environ.setdefault(CHOICE, "0")  # workers inherit it
    if chosen == "0":
        logger.info("%s=0: MLA on model runner V2 of this vLLM can compute a prompt without its beginning", CHOICE)
    else:
        logger.warning("%s=%s: steps in which MLA would compute wrong rows will be refused; 0 has none", CHOICE, chosen)


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("VllmConfig", "model_config", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
