"""vLLM 0.11.0 has to be told that prompts may be computed in pieces."""

from __future__ import annotations

import inspect
from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="chunked_prefill",
    kind=Kind.UPSTREAM,
    why=(
        "speculators 0.4 lets the caller choose smaller steps and counts on prompts being split: «max_num_batched_tokens "
        "(64) is smaller than max_model_len (512). This effectively limits the maximum sequence length»."
    ),
    changed="vLLM 0.11.1 turned `SchedulerConfig.enable_chunked_prefill` on by default; in 0.11.0 only its own engine did.",
    source="vllm/config/scheduler.py, line 74 in 0.11.1",
    vllm="<0.11.1",
    speculators=">=0.4,<0.5",
    probed_by="the default of SchedulerConfig's parameter, and whether the generator takes `max_num_batched_tokens`",
    remove_when="vLLM 0.11.0 is no longer supported",
)


def _probe(target: Target) -> Probe:
    parameter = target.parameters("SchedulerConfig").get("enable_chunked_prefill")
    if parameter is None:
        raise SeamMissing("SchedulerConfig(enable_chunked_prefill=)", "no such keyword")
    init = vars(target.bound("VllmHiddenStatesGenerator"))["__init__"]
    chosen = "max_num_batched_tokens" in inspect.signature(init).parameters
    steps = "steps of the caller's size" if chosen else "steps of at least max_model_len"
    return Probe(
        chosen and parameter.default in (None, False), f"{steps}, chunked prefill is {parameter.default} by default"
    )


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords["enable_chunked_prefill"] = True


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("SchedulerConfig", "enable_chunked_prefill", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
