"""Models in which every layer has a sliding window."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Keyword, PatchSet, Probe, Target

RECORD = Record(
    id="sliding_window",
    kind=Kind.CORRECTNESS,
    why=(
        "vLLM's engine passes the window of such a model (Mistral 7B v0.1, Phi-3, StarCoder 2) to `CacheConfig`, from where "
        "every attention layer takes it. speculators builds `CacheConfig` without it, so the model attends to everything: "
        "rows after the first window are wrong, without an error. Models that give each layer a window of its own (Gemma, "
        "gpt-oss) are not concerned, and must not get one here."
    ),
    changed="a fault of speculators' own, on every vLLM",
    source="speculators 0.3.0 vllm_hidden_states_generator.py, `CacheConfig(...)`; vllm/engine/arg_utils.py line 1421 in 0.16.0, line 2288 in 0.33.0",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="the parameters of CacheConfig; at start-up, the model's configuration",
    remove_when="never while speculators' in-process generator is supported",
)


def _probe(target: Target) -> Probe:
    there = "sliding_window" in target.parameters("CacheConfig")
    return Probe(there, f"CacheConfig has {'a' if there else 'no'} sliding_window")


def _adapt(_target: Target, keywords: dict[str, Any]) -> None:
    model, cache = keywords["model_config"], keywords["cache_config"]
    kinds = getattr(model.hf_text_config, "layer_types", None)
    if cache.sliding_window is None and (kinds is None or set(kinds) == {"sliding_attention"}):  # as vLLM's engine
        cache.sliding_window = model.get_sliding_window()


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Keyword("VllmConfig", "cache_config", _adapt),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
