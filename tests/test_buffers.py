"""The pool of buffers: what is used again, what is given back. No engine."""

from __future__ import annotations

import gc
import mmap
import os
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


def test_a_forked_child_keeps_the_rows_that_it_was_forked_with():
    pool = buffers.BufferPool()
    lent, kept = pool.take(5000)[1], pool.take(5000)[1]
    lent[:], kept[:] = 7, 7
    place = kept.ctypes.data
    (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(from_parent, 1)
            same = (lent == 7).all() and (kept == 7).all()
            kept[:] = 8
            os.write(to_parent, b"same" if same else b"other")
        finally:
            os._exit(0)
    kept[0] = 9
    address = lent.ctypes.data
    del lent
    _, after = pool.take(5000)
    after[:] = 1
    os.write(to_child, b"x")
    assert os.read(from_child, 5) == b"same"
    os.waitpid(child, 0)
    assert kept.ctypes.data == place
    assert kept[0] == 9
    assert (kept[1:] == 7).all()
    assert after.ctypes.data != address or len(pool.retired) == 1


def test_memory_ends_with_the_pool_and_its_rows():
    def held() -> int:
        return sum(
            "memfd:spec_vllm" in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()
        )

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:spec_vllm")

    gc.collect()
    before = held(), mapped()
    pool = buffers.BufferPool()
    lent, other = pool.take(5000)[1], pool.take(5000)[1]
    del other
    assert held() > before[0]
    del pool
    lent[:] = 3
    del lent
    gc.collect()
    assert (held(), mapped()) == before
