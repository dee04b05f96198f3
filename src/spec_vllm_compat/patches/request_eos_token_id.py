"""``Request`` lost its parameter ``eos_token_id``."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="request_eos_token_id",
    kind=Kind.UPSTREAM,
    why="speculators passes it: «Request.__init__() got an unexpected keyword argument 'eos_token_id'».",
    changed="vLLM 0.17.0 moved it into the sampling parameters; it only matters to stop checks, which prefill never meets.",
    source="vllm/v1/request.py, line 65 in 0.16.0, line 60 in 0.17.0",
    vllm=">=0.17",
    speculators=">=0.3,<0.5",
    probed_by="the parameters of Request",
    remove_when="never while speculators' in-process generator is supported",
)


def _probe(target: Target) -> Probe:
    there = "eos_token_id" in target.parameters("Request")
    return Probe(not there, "Request takes eos_token_id" if there else "Request does not take eos_token_id")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    keywords.pop("eos_token_id", None)


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("Request", "eos_token_id", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
