"""The pool of buffers: what is used again, what is given back. No engine."""

from __future__ import annotations

import mmap
import random

import pytest

buffers = pytest.importorskip("spec_vllm_compat.driver.buffers", reason="numpy is not installed")


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_a_buffer_is_at_most_a_quarter_larger_than_asked_for(size):
    buffer, array = buffers.BufferPool().take(size)
    assert size <= len(array) == buffer.size <= max(1.25 * size, size + mmap.PAGESIZE)


def test_calls_of_unlike_length_share_a_few_buffers():
    pool, rng, held, seen = buffers.BufferPool(), random.Random(0), [], set()
    for _ in range(500):
        buffer, array = pool.take(rng.randrange(800_000, 3_200_000))
        seen.add(buffer.segment.number)
        held = [*held, array][-2:]  # a script that saves one call while the next one runs
        del array
    assert len(seen) <= 20
    assert sum(buffer.size for buffer in pool._free) < 8 * 4_000_000


def test_what_nobody_needs_is_given_back_and_the_worker_is_told():
    pool = buffers.BufferPool()
    (large, array), (small, _) = pool.take(1_000_000), pool.take(1000)
    del array, _
    assert pool._free == [large, small]
    for _ in range(buffers.IDLE_CALLS + 1):
        pool.take(1000)
    assert pool._free == [small]
    assert pool.retired == [large.segment]
