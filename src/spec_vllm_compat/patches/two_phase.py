"""A scheduler step is two calls, execute and sample."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Process, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, Target

RECORD = Record(
    id="two_phase",
    kind=Kind.UPSTREAM,
    why=(
        "The second step raises «State error: sample_tokens() must be called after execute_model() returns None.» The "
        "sampled token is of no use here. On model runner V1 nothing that a later prefill step needs happens in "
        "`sample_tokens` (read in 0.11.1 to 0.33.0: it samples, appends sampled tokens, proposes drafts), so the worker "
        "drops the pending state right after the forward pass, in the same remote call. Measured on CPU, sampling instead "
        "takes as long (side `sample` of benchmarks/throughput.py, median ratio 0.99): dropping is kept because it waits for nothing and leaves "
        "no sampled token behind. On model runner V2 the counters of computed tokens advance inside `sample_tokens`, so there "
        "it is called."
    ),
    changed="vLLM 0.11.1: `execute_model` keeps its state and returns None until `sample_tokens` is called.",
    source="vllm/v1/worker/gpu_model_runner.py `execute_model_state`; vllm/v1/worker/gpu/model_runner.py `postprocess`",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether the executor has `sample_tokens`; the worker looks at its model runner",
    remove_when="vLLM executes a prefill step in one call again",
    process=Process.WORKER,
)


class TwoPhase(Mixin):
    """One remote call a step: execute, clear or sample, hand over the rows."""

    session: Any

    def execute_model(self, scheduler_output: Any, *_args: Any, **_kwargs: Any) -> None:
        self.session.step(self, scheduler_output)

    def sample_tokens(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is left to do: :meth:`execute_model` leaves no pending state."""


def _probe(target: Target) -> Probe:
    split = hasattr(target.bound("MultiprocExecutor"), "sample_tokens")
    return Probe(True, "execute and sample are two calls" if split else "execute and sample are one call")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Members("MultiprocExecutor", TwoPhase),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
