"""``collective_rpc(..., unique_reply_rank=0)`` returns the bare reply instead of a list of one."""

from __future__ import annotations

import inspect
from typing import Any

from spec_vllm_compat.patches.aux_hidden_states import by_request
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="reply_rank",
    kind=Kind.UPSTREAM,
    why=(
        "speculators 0.3 takes element 0 of the reply, 0.4 the reply itself. With the other form 0.3 takes the first "
        "layer for the list of layers."
    ),
    changed="vLLM 0.11.0 returns a list with one element, 0.11.1 and newer the bare value.",
    source="vllm/v1/executor/multiproc_executor.py `collective_rpc`, line 269 in 0.11.0, line 346 in 0.11.1",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="the executor's source: whether a single reply is unwrapped",
    remove_when="never while speculators' in-process generator is supported",
)


def _unwraps(target: Target) -> bool:
    collective_rpc = target.bound("MultiprocExecutor").collective_rpc
    if "unique_reply_rank" not in inspect.signature(collective_rpc).parameters:
        raise SeamMissing("MultiprocExecutor.collective_rpc(unique_reply_rank=)", "no such parameter")
    # 0.11.1 brought `sample_tokens` and the unwrapped reply in one change of this file.
    return hasattr(target.bound("MultiprocExecutor"), "sample_tokens")


def _probe(target: Target) -> Probe:
    gives = "the bare value" if _unwraps(target) else "a list of one"
    takes = "the bare value" if by_request(target) else "a list of one"
    return Probe(True, f"vLLM returns {gives}, speculators expects {takes}")


def _changes(target: Target) -> tuple[Change, ...]:
    vllm_unwraps, speculators_unwrapped = _unwraps(target), by_request(target)

    class ReplyRank(Mixin):
        """Hands speculators the reply of one rank in the form it expects."""

        session: Any

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            with self.session.awaiting(self, method, kwargs.get("args", ())):
                reply = super().collective_rpc(method, *args, **kwargs)
            if kwargs.get("unique_reply_rank") is None or kwargs.get("non_block"):
                return reply
            value = reply if vllm_unwraps else reply[0]
            value = self.decode_reply(method, value)
            return value if speculators_unwrapped else [value]

    return (Members("MultiprocExecutor", ReplyRank),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
