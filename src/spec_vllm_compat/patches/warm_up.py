"""Warming the model up became a call of its own."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, PatchSet, Probe, Target

RECORD = Record(
    id="warm_up",
    kind=Kind.UPSTREAM,
    why=(
        "speculators expects `initialize_from_config` to warm the model up too. Without it the kernels are compiled and "
        "tuned within the first `generate()`, and the seed is not reset; the rows are the same."
    ),
    changed="vLLM 0.27.0: `initialize_from_config` only allocates, `compile_or_warm_up_model` is called by the engine.",
    source="vllm/v1/executor/abstract.py, line 122 in 0.27.0; vllm/v1/engine/core.py, line 332 in 0.27.0",
    vllm=">=0.27",
    speculators=">=0.3,<0.5",
    probed_by="whether the executor has `compile_or_warm_up_model`",
    remove_when="never while speculators' in-process generator is supported",
)


class WarmUp:
    """Allocates and warms up, as one call did before."""

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        super().initialize_from_config(kv_cache_configs)  # type: ignore[misc]
        self.compile_or_warm_up_model()  # type: ignore[attr-defined]


def _probe(target: Target) -> Probe:
    apart = hasattr(target.bound("MultiprocExecutor"), "compile_or_warm_up_model")
    return Probe(apart, "warm-up is a call of its own" if apart else "initialize_from_config warms up")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Members("MultiprocExecutor", WarmUp),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
