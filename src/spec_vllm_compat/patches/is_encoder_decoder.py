"""``SchedulerConfig`` requires ``is_encoder_decoder``."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="is_encoder_decoder",
    kind=Kind.UPSTREAM,
    why="speculators 0.3 builds `SchedulerConfig` without it: «validation error … is_encoder_decoder … required».",
    changed="vLLM 0.11.1 added the parameter with a default, 0.12.0 took the default away.",
    source="vllm/config/scheduler.py, line 37 in 0.12.0",
    vllm=">=0.12",
    speculators=">=0.3,<0.4",
    probed_by="the parameters of SchedulerConfig, and whether the constants of speculators name it",
    remove_when="speculators 0.3 is no longer supported (0.4 passes it)",
)


def _probe(target: Target) -> Probe:
    parameter = target.parameters("SchedulerConfig").get("is_encoder_decoder")
    if parameter is None or parameter.default is not parameter.empty:
        return Probe(False, "SchedulerConfig does not require it")
    passed = target.passes("_create_vllm_config", "is_encoder_decoder")
    return Probe(not passed, "required, passed by speculators" if passed else "required, not passed by speculators")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords.setdefault("is_encoder_decoder", False)  # the generator drives decoder-only models


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("SchedulerConfig", "is_encoder_decoder", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
