"""What bad batches, errors and interrupts leave behind in a generator and its workers."""

from __future__ import annotations

import logging
import threading
from typing import Any

from spec_vllm_compat.driver.call import Call, prompts_of
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, Target, Wrap

RECORD = Record(
    id="lifecycle",
    kind=Kind.CORRECTNESS,
    why=(
        "After an error or Ctrl-C in `generate()`, 0.3 keeps the requests and hands their rows to the next call. A sequence "
        "of length 0 breaks every later call; a token id outside the vocabulary kills the engine or gives garbage. An "
        "exception in the constructor leaves workers running. No name that the module binds lies at these places, so the "
        "two methods are wrapped: checked before, compared with what was captured after, cleaned up in any case."
    ),
    changed="faults of speculators' own, on every vLLM",
    source="speculators 0.3.0 and 0.4.0.1 vllm_hidden_states_generator.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="the methods of VllmHiddenStatesGenerator",
    remove_when="never while speculators' in-process generator is supported",
)


logger = logging.getLogger("spec_vllm_compat")


class Shutdown(Mixin):
    """Ends the workers once; speculators, vLLM's watch over dead workers and the interpreter's exit each ask for it."""

    def shutdown(self) -> None:
        with self.__dict__.setdefault(
            "_spec_vllm_compat_ending", threading.RLock()
        ):  # who comes second waits for the end
            if vars(self).get("_spec_vllm_compat_ended"):
                return
            self._spec_vllm_compat_ended = True
            super().shutdown()
            finalizer = getattr(self, "_finalizer", None)
            if finalizer is not None:  # it holds a reference to this executor until the interpreter exits
                finalizer.detach()


def _construct(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def layer_ids_of(_model_path: Any = None, layer_ids: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return layer_ids

    layer_ids = layer_ids_of(*args, **kwargs)
    if layer_ids is not None and not len(layer_ids):
        raise ValueError("layer_ids is empty: expected at least one decoder layer, or None for speculators' own choice")
    try:
        wrapped(*args, **kwargs)
    except BaseException:
        executor = vars(generator).get("executor")
        if executor is not None:
            executor.shutdown()
        raise
    generator.scheduler.session = generator.executor.session
    generator.scheduler.executor = generator.executor


def _set_up_capture(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    session = generator.executor.session
    session.model, session.asked = str(generator.model_path), tuple(generator.layer_ids)
    session.capturing = session.ask(generator.executor, "capture", tuple(sorted(set(session.asked))))[0]
    logger.info("%s", session.sentence())
    return wrapped(*args, **kwargs)


def _generate(wrapped: Any, generator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def token_ids_of(token_ids: Any) -> Any:
        return token_ids

    session = getattr(generator.executor, "session", None)
    if session is None:
        raise CompatError(
            "this generator was built before spec_vllm_compat was imported; import it first, then build a new one"
        )
    with session.turn:  # other threads wait for theirs
        return _take_turn(wrapped, generator, session, token_ids_of(*args, **kwargs))


def _take_turn(wrapped: Any, generator: Any, session: Any, token_ids: Any) -> Any:
    session.require_usable()
    if generator.scheduler.unfinished():
        generator.scheduler.abandon()
    model = generator.vllm_config.model_config
    prompts = prompts_of(token_ids, model.max_model_len - 1, model.get_vocab_size())
    text = model.hf_text_config
    layers = session.capturing.layer_ids
    session.call = Call(prompts, layers, text.hidden_size, model.dtype, session.pool, session.shared)
    try:
        results = wrapped(prompts)
        session.call.check(results, session.asked)
        return results
    except BaseException:
        generator.scheduler.abandon()
        raise
    finally:
        session.call = None


def _probe(_target: Target) -> Probe:
    return Probe(True, "calls are checked before and after")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (
        Members("MultiprocExecutor", Shutdown),
        Wrap("__init__", _construct),
        Wrap("_setup_capture", _set_up_capture),
        Wrap("generate", _generate),
    )


PATCH_SET = PatchSet(RECORD, _probe, _changes)
