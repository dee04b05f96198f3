"""What goes wrong without us, or on purpose: a right answer or an error, never a wrong row."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
from typing import Any

import pytest

pytestmark = pytest.mark.stack
LAYERS = [1, 3, 4]


@pytest.fixture(scope="module")
def generator(build, small_model):
    return build(small_model(), float32=True, layer_ids=LAYERS, max_model_len=2048)


@pytest.fixture
def right(generator, small_model, reference):
    """Asserts that the generator gives right rows for a batch."""
    from reference import FLOAT32, assert_rows

    def check(prompts: list[list[int]], results: list[dict[str, Any]] | None = None) -> None:
        results = generator.generate(prompts) if results is None else results
        assert len(results) == len(prompts)
        for ids, result in zip(prompts, results, strict=True):
            assert_rows(result, ids, LAYERS, reference(small_model()), FLOAT32)

    return check


BAD_INPUT = [
    pytest.param([], "token_ids is empty", id="empty batch"),
    pytest.param([[5, 6], []], r"token_ids\[1\] is empty", id="empty sequence"),
    pytest.param(
        [[5, 6], [5, 512]], r"token_ids\[1\]\[1\] is 512: outside the vocabulary \[0, 512\)", id="past the end"
    ),
    pytest.param([[5, -1]], r"token_ids\[0\]\[1\] is -1", id="negative"),
    pytest.param([[5, 2**31]], r"is 2147483648: outside", id="more than 31 bits"),
    pytest.param([[5, 1.5]], "expected a list of integers", id="not an integer"),
    pytest.param([5, 6], r"token_ids\[0\]: expected a list of integers; found 5", id="one sequence"),
    pytest.param(None, "token_ids: expected a list of lists of integers; found None", id="none"),
]


@pytest.mark.parametrize(("token_ids", "said"), BAD_INPUT)
def test_bad_input_is_refused_before_any_work(generator, batch, right, monkeypatch, token_ids, said):
    from spec_vllm_compat import InvalidBatchError

    with monkeypatch.context() as patch:
        patch.setattr(generator.executor, "collective_rpc", lambda *_a, **_k: pytest.fail("work was done"))
        with pytest.raises(InvalidBatchError, match=said):
            generator.generate(token_ids)
    right(batch(20, 5))


def test_bad_tensors_are_refused(generator):
    import torch

    from spec_vllm_compat import InvalidBatchError

    for tensor in (torch.zeros(0, 4, dtype=torch.long), torch.zeros(4), torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises(InvalidBatchError):
            generator.generate(tensor)


def test_layer_out_of_range_is_refused_before_any_work(build, small_model, monkeypatch, generator_module):
    monkeypatch.setattr(generator_module, "MultiprocExecutor", lambda **_k: pytest.fail("work was done"))
    for layer in (6, -1):
        with pytest.raises(ValueError, match=f"Layer index {layer} out of bounds"):
            build(small_model(), layer_ids=[1, layer])
    with pytest.raises(ValueError, match="layer_ids is empty"):
        build(small_model(), layer_ids=[])


def test_a_worker_error_is_raised_and_the_next_call_is_right(generator, batch, right, monkeypatch):
    """Upstream, the call after a failed call returns other sequences' rows."""
    from spec_vllm_compat import ExtractionError
    from spec_vllm_compat.driver.session import Session

    steps, original = [], Session.step

    def second_step_is_damaged(session: Any, executor: Any, scheduler_output: Any) -> None:
        steps.append(scheduler_output)
        if len(steps) == 2:
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = {"no_such_request": 5}
        original(session, executor, scheduler_output)

    prompts = batch(*[1500] * 8)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", second_step_is_damaged)
        with pytest.raises(ExtractionError, match="worker failed in 'step': rank 0"):
            generator.generate(prompts)
    assert len(steps) == 2
    right(batch(50, 7, 33, seed=1))
    right(prompts)


def test_an_interrupt_leaves_nothing_behind(generator, batch, right):
    prompts = batch(*[1500] * 8)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(generator, prompts)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert not generator.scheduler.requests
    assert generator.executor.session.call is None
    right(batch(40, 9, seed=2))


def _generate_for_ever(generator: Any, prompts: list[list[int]]) -> None:
    for _ in range(50):
        generator.generate(prompts)


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupting(monkeypatch: Any, holder: Any, name: str, when: Any = lambda *_args: True) -> None:
    """The first matching call is followed by Ctrl-C before it returns."""
    original, sent = getattr(holder, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not sent and when(*args):
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(holder, name, wrapper)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("place", ["scheduler", "request of speculators"])
def test_an_interrupt_in_the_middle_of_a_change_leaves_nothing_behind(generator, batch, right, monkeypatch, place):
    """Blocks taken and not yet noted were lost; a reply that nobody read was taken for that of the next question."""
    pool = generator.scheduler.kv_cache_manager.block_pool
    if place == "scheduler":
        _interrupting(monkeypatch, pool, "get_new_blocks")
    else:
        _interrupting(
            monkeypatch, generator.executor.rpc_broadcast_mq, "enqueue", lambda call, *_: call[0] == "_reset_capture"
        )
    with pytest.raises(KeyboardInterrupt):
        generator.generate(batch(40, 9, seed=3))
    assert pool.get_num_free_blocks() == generator.scheduler.kv_cache_config.num_blocks - 1
    right(batch(40, 9, seed=4))
    assert generator.executor.collective_rpc(_requests_known) == [[]]


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_of_a_terminal_reaches_the_workers_too(generator, batch, right):
    worker = generator.executor.workers[0].proc.pid
    timer = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGINT) for pid in (worker, os.getpid())])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        _generate_for_ever(generator, batch(*[1500] * 8))
    timer.join()
    right(batch(40, 9, seed=2))


@pytest.mark.usefixtures("interruptible")
def test_an_error_does_not_swallow_an_interrupt():
    from spec_vllm_compat.driver.session import interrupts_wait

    def fails() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("on purpose")

    with pytest.raises(KeyboardInterrupt):
        fails()


def test_requests_that_were_not_dropped_do_not_reach_the_next_call(generator, batch, right, monkeypatch):
    with monkeypatch.context() as patch:  # as if a second Ctrl-C came before they were
        patch.setattr(type(generator.scheduler), "abandon", lambda _scheduler: None)
        patch.setattr(type(generator.executor.session), "step", lambda *_args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(batch(40, 9))
    assert generator.scheduler.requests
    right(batch(40, 9, seed=2))


def test_threads_take_turns(generator, batch, right):
    batches, results = [batch(60, 40, 30, seed=seed) for seed in range(12)], {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: generator.generate(batches[n])})) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    for number, found in results.items():
        right(batches[number], found)


def test_a_scheduler_that_fails_is_not_used_again(build, small_model, batch, monkeypatch):
    from spec_vllm_compat import CompatError

    generator = build(small_model(), layer_ids=[1])
    monkeypatch.setattr(generator.scheduler.kv_cache_manager, "allocate_slots", lambda *_args, **_kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generator.generate(batch(9))
    with pytest.raises(
        CompatError, match=r"cannot be used any more: its scheduler did not come to an end \(ZeroDivision"
    ):
        generator.generate(batch(9))


def test_no_request_is_left_in_scheduler_or_workers(generator, batch):
    for seed in range(5):
        generator.generate(batch(10, 20, 30, 40, seed=seed))
    (left,) = generator.executor.collective_rpc(_requests_known)
    assert left == []
    assert not generator.scheduler.requests
    assert not generator.scheduler.finished_req_ids
    pool = generator.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == generator.scheduler.kv_cache_config.num_blocks - 1


def _requests_known(worker: Any) -> list[str]:
    return sorted({*worker.model_runner.requests, *worker.model_runner.input_batch.req_id_to_index})


def test_device_memory_for_rows_is_one_step(generator, batch):
    generator.generate(batch(*[1500] * 8))
    (shape,) = generator.executor.collective_rpc(_buffer_shape)
    assert shape == (len(LAYERS), 8192, 128)


def _buffer_shape(worker: Any) -> tuple[int, ...]:
    return tuple(worker._spec_vllm_compat._buffer.shape)


# --- tests of the tests: each damage must be noticed -----------------------------------------------------------------


def _rows(step: Any, order: list[int]) -> Any:
    inline = dataclasses.replace(step.inline, rows=step.inline.rows[:, order], peaks=step.inline.peaks[:, order])
    return dataclasses.replace(step, inline=inline)


def _shift_a_row(step: Any) -> Any:
    count = step.inline.rows.shape[1]
    return _rows(step, [0, 1, 2, 2, 3, *range(5, count)])


def _swap_rows_of_requests(step: Any) -> Any:
    first, second, *_rest = step.chunks
    assert first.rows == second.rows
    count = step.inline.rows.shape[1]
    return _rows(step, [*range(first.rows, 2 * first.rows), *range(first.rows), *range(2 * first.rows, count)])


def _swap_requests(step: Any) -> Any:
    first, second, *rest = step.chunks
    return dataclasses.replace(step, chunks=(second, first, *rest))


def _drop_a_chunk(step: Any) -> Any:
    return dataclasses.replace(step, chunks=step.chunks[:-1])


def _next_layer(step: Any) -> Any:
    import numpy as np

    inline = dataclasses.replace(
        step.inline, rows=np.roll(step.inline.rows, 1, axis=0), peaks=np.roll(step.inline.peaks, 1, axis=0)
    )
    return dataclasses.replace(step, inline=inline)


def _damage_peaks(step: Any, value: float, rows: slice) -> Any:
    peaks = step.inline.peaks.copy()
    peaks[1, rows] = value
    return dataclasses.replace(step, inline=dataclasses.replace(step.inline, peaks=peaks))


def _nan(step: Any) -> Any:
    return _damage_peaks(step, float("nan"), slice(2, 3))


def _zeros(step: Any) -> Any:
    return _damage_peaks(step, 0.0, slice(0, 30))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_shift_a_row, "worst row off by"),
        (_swap_rows_of_requests, "worst row off by"),
        (_swap_requests, "was computed from token"),
        (_drop_a_chunk, "expected 12 rows; found 0"),
        (_next_layer, "worst row off by"),
        (_nan, "layer 3, row 2 holds NaN or infinite values"),
        (_zeros, "layer 3 is zero in every row"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_damaged_rows_are_noticed(generator, batch, right, monkeypatch, damage, said):
    from spec_vllm_compat import ExtractionError
    from spec_vllm_compat.driver.call import Call

    take_in = Call.take_in
    monkeypatch.setattr(generator.executor.session, "shared", False)  # the rows come through our hands
    monkeypatch.setattr(Call, "take_in", lambda call, step: take_in(call, damage(step) if step.chunks else step))
    with pytest.raises((ExtractionError, AssertionError), match=said):
        right(batch(30, 30, 12))


def test_the_layer_above_is_noticed(generator, batch, right):
    session = generator.executor.session
    session.ask(generator.executor, "capture", tuple(layer + 1 for layer in LAYERS))
    try:
        with pytest.raises(AssertionError, match="layer 1: worst row off by"):
            right(batch(30, 12))
    finally:
        session.ask(generator.executor, "capture", tuple(LAYERS))
    right(batch(30, 12))


def test_the_repair_of_the_truth_value_alone_is_noticed(generator, batch, right, monkeypatch):
    """With the bare reply, element 0 is the first layer, and its rows pass for layers: wrong, and without an error."""
    from spec_vllm_compat import ExtractionError

    decode = type(generator.executor).decode_reply

    def rows_as_layers(executor: Any, method: str, value: Any) -> Any:
        layers = decode(executor, method, value)
        if isinstance(layers, dict):  # speculators 0.4: the same damage in its form
            return {request_id: list(states[0].cpu()) for request_id, states in layers.items()}
        if isinstance(layers, list):
            return list(layers[0][0:30].cpu())
        return layers

    monkeypatch.setattr(type(generator.executor), "decode_reply", rows_as_layers)
    with pytest.raises(ExtractionError, match="3 layers asked for, 30 returned"):
        right(batch(30))


def test_a_small_kv_cache_gives_right_rows_or_an_error(
    build, small_model, generator_module, batch, reference, monkeypatch
):
    from reference import FLOAT32, assert_rows
    from spec_vllm_compat import InvalidBatchError

    plan = generator_module.get_kv_cache_config_from_groups
    blocks = 40 * 16 * 6 * 2 * 2 * 32 * 4  # 40 blocks of 16 tokens, 6 layers, K and V, 2 heads of 32 float32 values
    monkeypatch.setattr(
        generator_module, "get_kv_cache_config_from_groups", lambda **kw: plan(**{**kw, "available_memory": blocks})
    )
    generator = build(small_model(), float32=True, layer_ids=LAYERS, max_model_len=1024)
    assert generator.scheduler.kv_cache_config.num_blocks == 40
    prompts = batch(300, 299, 10, 500, 301, 40, 39, 38)
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, LAYERS, reference(small_model()), FLOAT32)
    with pytest.raises(InvalidBatchError, match=r"a prompt of 700 tokens needs 44 KV cache blocks; the cache has 39"):
        generator.generate(batch(10, 700))
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, LAYERS, reference(small_model()), FLOAT32)
