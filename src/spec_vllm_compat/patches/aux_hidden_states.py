"""Captured states: the truth value of a tensor, and layers in the order asked for."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.driver.call import states_by_layer, states_by_request
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, Target

RECORD = Record(
    id="aux_hidden_states",
    kind=Kind.UPSTREAM,
    why=(
        "`if not aux_hidden_states` raises «Boolean value of Tensor with more than one value is ambiguous», because "
        "`[0]` of a bare reply is the first layer's tensor. Repairing that line alone is worse: the code then runs, "
        "iterates over the rows of one layer as if they were layers, and returns them. Besides, speculators returns "
        "layers in ascending order without repetitions, whatever was asked for."
    ),
    changed="vLLM 0.11.1 returns the bare reply (see reply_rank); the layer order was never kept by speculators.",
    source="speculators 0.3.0 vllm_hidden_states_generator.py, `captured_states_list[0]`; custom_worker.py, `frozenset`",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether speculators keeps a request's rows apart (0.4: a dictionary by request id; 0.3: whole layers)",
    remove_when="never while speculators' in-process generator is supported",
)


class AuxHiddenStates(Mixin):
    """Gives the reply to ``_get_captured_states`` the form that this speculators takes."""

    session: Any

    def decode_reply(self, method: Any, value: Any) -> Any:
        if method != "_get_captured_states":
            return value
        return states_by_layer(self.session.finish(self), self.session.asked)


class AuxHiddenStatesByRequest(Mixin):
    """The same for speculators 0.4: a dictionary, request id to layers."""

    session: Any

    def decode_reply(self, method: Any, value: Any) -> Any:
        if method != "_get_captured_states":
            return value
        return states_by_request(self.session.finish(self), self.session.asked)


def by_request(target: Target) -> bool:
    """Whether this speculators takes captured states by request id, as 0.4 does."""
    generate = vars(target.bound("VllmHiddenStatesGenerator"))["generate"]
    code = getattr(generate, "__wrapped__", generate).__code__
    return "_set_request_metadata" in code.co_consts


def _probe(target: Target) -> Probe:
    return Probe(True, "states by request id" if by_request(target) else "states as whole layers")


def _changes(target: Target) -> tuple[Change, ...]:
    return (Members("MultiprocExecutor", AuxHiddenStatesByRequest if by_request(target) else AuxHiddenStates),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
