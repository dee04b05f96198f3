"""A batch may need several scheduler steps; speculators loses or starves what does not fit the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from spec_vllm_compat.driver.session import interrupts_wait
from spec_vllm_compat.errors import ExtractionError, InvalidBatchError
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="prefill_steps",
    kind=Kind.CORRECTNESS,
    why=(
        "speculators 0.3 aborts a request after its first chunk: the rest of the prompt is lost and every later sequence "
        "shifted, without an error. 0.4 never finishes a request within a call: above 32 sequences or a full KV cache it "
        "raises «not found in captured states» or returns the first chunk only. Neither tells the workers which requests "
        "ended in the last step."
    ),
    changed="vLLM 0.11.1 splits prompts over steps by default (`enable_chunked_prefill`); 0.11.0 skipped them and went on.",
    source="vllm/config/scheduler.py, line 74 in 0.11.1; vllm/v1/core/sched/scheduler.py, line 431 in 0.11.0",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether Scheduler has `schedule`, `add_request` and `finish_requests`",
    remove_when="never while speculators' in-process generator is supported",
)


class PrefillSteps(Mixin):
    """A scheduler that ends a request exactly when its prompt has been computed.

    A request is let in only while the KV cache has room for the whole prompts of all that are in. So none is ever
    preempted, and every token is scheduled once: speculators 0.4 counts scheduled tokens and would stop too early.
    """

    session: Any = None
    executor: Any = None

    _spec_vllm_compat_told: frozenset[str] = frozenset()
    finished_req_ids: set[str]

    def add_request(self, request: Any) -> None:
        needed = self._blocks(request)
        if needed > self._capacity():
            raise InvalidBatchError(
                f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens needs {needed} KV cache "
                f"blocks; the cache has {self._capacity()}. Raise gpu_memory_utilization (on CPU: "
                "VLLM_CPU_KVCACHE_SPACE) or lower max_model_len."
            )
        if self.session.call is None:
            raise ExtractionError(
                "a request was added outside of generate(). If spec_vllm_compat was uninstalled, call its install() again"
            )
        self.session.call.register(request.request_id, request.prompt_token_ids)
        self._held().append(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            self._finish(request_id for request_id in list(self.requests) if self._prefilled(request_id))
            self._admit()
            output = super().schedule(*args, **kwargs)
            self._spec_vllm_compat_told = frozenset(output.finished_req_ids)
        if output.total_num_scheduled_tokens == 0:
            if self.requests or self._held():
                waiting = [*self.requests, *(request.request_id for request in self._held())]
                raise ExtractionError(f"the scheduler stopped with prompts left over: {', '.join(waiting)}")
            if output.finished_req_ids:
                # speculators ends its loop here; without this step the workers would keep these requests for ever.
                self.executor.execute_model(output)
        return output

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None:
        """speculators says "aborted" after any step; a prompt that is not done goes on."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._whole():
            self._finish((request_id for request_id in ids if self._prefilled(request_id)), finished_status)

    def abandon(self) -> None:
        """Drop every request, after an error or an interrupt."""
        if self.session.broken is not None:  # nothing will be scheduled again
            return
        with self._whole():
            self._held().clear()
            self._finish(list(self.requests))
            # An interrupt between scheduling and the step: the workers have not heard of them. Twice does no harm.
            self.finished_req_ids.update(self._spec_vllm_compat_told)

    def unfinished(self) -> bool:
        """Whether requests are left: a second Ctrl-C can come between an error and `abandon`."""
        return bool(self.requests or self._held())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """vLLM's scheduler, left in the middle of a change, loses blocks and requests."""
        with interrupts_wait():
            try:
                yield
            except BaseException as error:
                self.session.broken = f"its scheduler did not come to an end ({type(error).__name__}: {error})"
                raise

    def _finish(self, request_ids: Iterable[str], status: Any = None) -> None:
        from vllm.v1.request import RequestStatus

        ids = list(request_ids)
        if ids:
            super().finish_requests(ids, status or RequestStatus.FINISHED_ABORTED)

    def _prefilled(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.num_computed_tokens >= request.num_prompt_tokens

    def _admit(self) -> None:
        free = self._capacity() - sum(self._blocks(request) for request in self.requests.values())
        held = self._held()
        while held and self._blocks(held[0]) <= free:
            request = held.pop(0)
            free -= self._blocks(request)
            super().add_request(request)

    def _held(self) -> list[Any]:
        held: list[Any] = self.__dict__.setdefault("_spec_vllm_compat_held", [])
        return held

    def _blocks(self, request: Any) -> int:
        """KV cache blocks of a whole prompt and its next token, all groups of layers together."""
        tokens = request.num_prompt_tokens + 1
        groups = self.kv_cache_config.kv_cache_groups
        return sum(-(-tokens // group.kv_cache_spec.block_size) for group in groups)

    def _capacity(self) -> int:
        return int(self.kv_cache_config.num_blocks) - 1  # block 0 is the null block


def _probe(target: Target) -> Probe:
    scheduler = target.bound("Scheduler")
    for name in ("schedule", "add_request", "finish_requests"):
        if not callable(getattr(scheduler, name, None)):
            raise SeamMissing(f"Scheduler.{name}", "no such method")
    return Probe(True, "requests end when their prompt is computed")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Members("Scheduler", PrefillSteps),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
