"""How rows reach the caller: whose memory they are, and what is left behind when a process is killed."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def generator(build, small_model):
    return build(small_model(), float32=True, layer_ids=[1, 3, 1], max_model_len=2048)


def copies(results):
    return [[rows.clone() for rows in result["hidden_states"]] for result in results]


def equal(results, kept) -> bool:
    import torch

    return all(
        torch.equal(rows, copy)
        for result, saved in zip(results, kept, strict=True)
        for rows, copy in zip(result["hidden_states"], saved, strict=True)
    )


def test_rows_belong_to_the_caller_for_as_long_as_they_are_kept(generator, batch):
    import torch

    kept = [generator.generate(batch(40, 9, 300, seed=seed)) for seed in range(6)]
    saved = [copies(results) for results in kept]
    generator.generate(batch(300, 300, seed=9))
    assert all(equal(results, copy) for results, copy in zip(kept, saved, strict=True))
    first, _second, again = kept[0][0]["hidden_states"]
    assert torch.equal(first, again)
    first.zero_()  # writing is allowed, and changes no other tensor, not even the same layer asked for twice
    assert not torch.equal(first, again)
    saved[0][0][0].zero_()
    assert all(equal(results, copy) for results, copy in zip(kept, saved, strict=True))


def test_memory_is_used_again_once_nobody_holds_it(generator, batch, monkeypatch):
    from spec_vllm_compat.driver import buffers

    pool = buffers.BufferPool()
    monkeypatch.setattr(generator.executor.session, "pool", pool)
    (mapped_before,) = generator.executor.collective_rpc(_mapped)
    prompts = batch(50, 60)
    results = generator.generate(prompts)
    address = results[0]["hidden_states"][0].data_ptr()
    for _ in range(20):
        del results
        gc.collect()
        results = generator.generate(prompts)
        assert results[0]["hidden_states"][0].data_ptr() == address
    one_row = results[1]["hidden_states"][1][3]
    del results
    gc.collect()
    assert generator.generate(prompts)[0]["hidden_states"][0].data_ptr() != address, "a view still holds it"
    del one_row
    held = [generator.generate(prompts) for _ in range(5)]
    del held
    gc.collect()
    assert len(pool._free) >= 5
    for _ in range(buffers.IDLE_CALLS + 2):
        generator.generate(prompts)
    assert len(pool._free) <= 1
    (mapped,) = generator.executor.collective_rpc(_mapped)
    assert mapped <= mapped_before + 2


def _mapped(worker) -> int:
    return len(worker._spec_vllm_compat.sink._mapped)


def test_a_saved_sample_is_as_large_as_its_rows(generator, batch):
    import torch

    results = generator.generate(batch(100, 500, 700))
    file = io.BytesIO()
    torch.save(results[0], file)
    rows = sum(states.nbytes for states in results[0]["hidden_states"])
    assert rows < file.tell() < rows + 8192


def test_rows_in_replies_are_the_same(generator, batch, monkeypatch):
    """Where a worker cannot map the driver's memory: another host, another container."""
    prompts = batch(2000, 1900, 5, 2000, 1700, 1900)
    mapped = copies(generator.generate(prompts))
    session = generator.executor.session
    monkeypatch.setattr(session, "shared", False)
    assert equal(generator.generate(prompts), mapped)


def test_a_worker_that_cannot_map_says_why_and_goes_on(generator, batch, monkeypatch, caplog):
    from spec_vllm_compat.driver import buffers
    from spec_vllm_compat.protocol import Segment

    prompts = batch(33, 12)
    expected = copies(generator.generate(prompts))
    session = generator.executor.session
    monkeypatch.setattr(session, "shared", True)
    monkeypatch.setattr(session, "pool", buffers.BufferPool())
    monkeypatch.setattr(
        buffers, "Segment", lambda number, path, size: Segment(number, "/proc/1/fd/no-such-descriptor", size)
    )
    results = generator.generate(prompts)
    assert session.shared is False
    assert "the worker cannot map the driver's memory" in caplog.text
    assert equal(results, expected)


KILLED = """
import spec_vllm_compat, sys
from speculators.data_generation import VllmHiddenStatesGenerator
generator = VllmHiddenStatesGenerator({model!r}, layer_ids=[1, 3], max_model_len=2048, gpu_memory_utilization=0.3)
kept = []
while True:
    kept = [*kept[-3:], generator.generate([list(range(3, 500)) * 3] * 8)]
    print("call", flush=True)
"""


def test_a_killed_driver_leaves_nothing_behind(small_model, tmp_path):
    before = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(model=str(small_model()))],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    calls = (line for line in driver.stdout if line == "call\n")  # vLLM's own lines in between
    for _ in range(2):
        assert next(calls, None), "the driver ended by itself"
    children = subprocess.run(
        ["pgrep", "-P", str(driver.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert children
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in children) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]
    # vLLM's own queues are named psm_*; ours have no names at all.
    assert {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith(("psm_", "sem."))} == set()
