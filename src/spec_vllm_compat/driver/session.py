"""State of one generator on the driver, shared by the adapters of its executor and its scheduler."""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spec_vllm_compat.driver.buffers import BufferPool
from spec_vllm_compat.driver.call import Call
from spec_vllm_compat.errors import CompatError, ExtractionError, exit_code
from spec_vllm_compat.protocol import ASK, Answer, Capturing, Layout, Step

logger = logging.getLogger("spec_vllm_compat")


#: Sessions of the generators that live in this process, in the order in which they were built.
_sessions: list[weakref.ref[Session]] = []


def sentences() -> list[str]:
    """What each living generator captures, for the report."""
    return [said for reference in _sessions if (session := reference()) and (said := session.sentence())]


class Session:
    """What one generator asked for and what its workers answered.

    Attributes:
        model: path or name of its model.
        asked: layer ids in the order of the caller, repetitions included.
        capturing: what the workers capture, once they have been told.
        meaning: which of the tensors that a decoder layer returns make a row, once a call has shown it.
        call: the running ``generate()`` call, or None.
        pool: memory for captured rows.
        shared: whether the capturing worker can map that memory; if not, rows travel in the replies.
        broken: why no further call can be trusted, or None.
    """

    def __init__(self) -> None:
        self.model = ""
        self.asked: tuple[int, ...] = ()
        self.capturing: Capturing | None = None
        self.meaning: str | None = None
        self.call: Call | None = None
        self.pool = BufferPool()
        self.shared = True
        self._attached: set[int] = set()
        self.broken: str | None = None
        self.turn = threading.RLock()  # one call at a time
        _sessions.append(weakref.ref(self, _sessions.remove))

    def sentence(self) -> str:
        """Which layers are captured and what a row is, or an empty string before the workers have said so."""
        if self.capturing is None:
            return ""
        layers = f"{self.model}: layers {self.capturing.container}.K, K = {list(self.asked)}"
        return f"{layers}; a row is what a layer returns as {self.meaning}" if self.meaning else layers

    def ask(self, executor: Any, request: str, *args: Any) -> list[Any]:
        """Ask every rank; values by rank.

        An interrupt waits for the replies, so that none is left over for the next question.

        Raises:
            ExtractionError: a rank failed. The other ranks' replies are read, so the executor stays usable. Or ranks died
                or did not answer; then the generator is not usable any more.
        """
        import vllm.envs

        self.require_usable()
        answers: list[Answer] = executor.collective_rpc(
            ASK, args=(request, *args), timeout=vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        )
        failed = [f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error]
        if failed:
            raise ExtractionError(f"worker failed in {request!r}: {'; '.join(failed)}")
        return [answer.value for answer in answers]

    @contextmanager
    def awaiting(self, executor: Any, method: Any, args: Sequence[Any]) -> Iterator[None]:
        """Around every remote call: afterwards all replies have been read, or the generator is not usable any more."""
        with interrupts_wait():
            try:
                yield
            except Exception as error:
                ended = [(w.rank, w.proc.exitcode) for w in getattr(executor, "workers", ()) if not w.proc.is_alive()]
                if not ended and method != ASK:
                    raise
                ranks = ", ".join(f"rank {rank} (exit code {exit_code(code)})" for rank, code in ended)
                happened = f"worker processes have ended: {ranks}," if ended else "the workers did not answer"
                self.broken = f"{happened} in {_name(method, args)} ({type(error).__name__}: {error})"
                raise ExtractionError(f"{self.broken}; see the workers' own messages above") from error
            except BaseException:  # a second Ctrl-C: replies are still on their way
                self.broken = f"it was interrupted in {_name(method, args)}"
                raise

    def require_usable(self) -> None:
        """Raise :class:`CompatError` if the workers are gone or out of step with the driver."""
        if self.broken is not None:
            raise CompatError(f"this generator cannot be used any more: {self.broken}. Build a new one.")

    def step(self, executor: Any, scheduler_output: Any) -> None:
        """Execute one scheduler step on every rank and take in its rows."""
        layout = self._layout(executor) if self.call is not None else None
        steps: list[Step] = self.ask(executor, "step", scheduler_output, layout)
        first = steps[0]
        for rank, step in enumerate(steps):
            if step.chunks != first.chunks or step.layer_calls != first.layer_calls:
                raise ExtractionError(f"rank {rank} ran another batch than rank 0: {step.chunks} and {first.chunks}")
            _same_on_every_rank(rank, step.samples, first.samples)
        if first.chunks and self.call is None:
            raise ExtractionError("a step was executed outside of generate()")
        if self.call is not None:
            self.call.take_in(first)

    def finish(self, executor: Any) -> Call:
        """Wait for the last rows of the running call and prove that all are right."""
        if self.call is None:
            raise ExtractionError("captured states were asked for outside of generate()")
        self.meaning = self.ask(executor, "finish")[0]
        self.call.complete()
        return self.call

    def _layout(self, executor: Any) -> Layout | None:
        """The call's layout if the workers do not have it yet, its memory made known to the one that captures."""
        assert self.call is not None
        segment = self.call.segment if self.shared else None
        retired = tuple(self.pool.retired)
        if segment is not None and segment.number in self._attached:
            segment = None
        if segment is not None or retired:
            reason = self.ask(executor, "attach", segment, retired)[0]
            del self.pool.retired[: len(retired)]  # not before: an interrupt would lose them
            self._attached -= {old.number for old in retired}
            if segment is not None and not reason:
                self._attached.add(segment.number)
            if reason:
                logger.warning("rows travel through vLLM's message queue, which is slow: %s", reason)
                self.shared = False
                self.call.without_segment()
        return self.call.layout()


def _same_on_every_rank(rank: int, found: Sequence[float], due: Sequence[float]) -> None:
    """Rows are taken from rank 0: raise unless the others computed the same, but for rounding."""
    scale = max((abs(value) for value in due if np.isfinite(value)), default=0.0)
    if len(found) != len(due) or not np.allclose(found, due, rtol=0, atol=0.05 * scale, equal_nan=True):
        raise ExtractionError(
            f"expected decoder layers to return the same on every rank; found other values on rank {rank} than on rank 0. Do "
            "they return a rank's part of a sum, which the next layer completes (DeepSeek-V3.2 in vLLM 0.32 does)? Use "
            "tensor_parallel_size=1 for this model, or a vLLM whose layers return whole rows."
        )


def _name(method: Any, args: Sequence[Any]) -> str:
    return repr(args[0] if method == ASK and args else getattr(method, "__name__", method))


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold the first SIGINT back until the block is done; a second one goes through at once."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    came = False

    def note(signum: int, frame: Any) -> None:
        nonlocal came
        if came:
            previous(signum, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:  # whatever else happened: an error must not swallow it
            previous(signal.SIGINT, None)
