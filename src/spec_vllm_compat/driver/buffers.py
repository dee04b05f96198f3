"""Host memory for captured rows: mapped by the driver and by the worker that writes it, reused when nobody holds it.

Fresh memory is the slow part of moving rows (1 to 3 GB/s against 50), so a buffer is used again as soon as no tensor that
was handed out refers to it, and not before.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from typing import Any

import numpy as np

from spec_vllm_compat.protocol import Segment

#: A buffer that this many calls in a row did not need is freed. Scripts that save some batches while the next one runs have
#: several in use at times, and a new one costs as much as it takes to compute what it will hold.
IDLE_CALLS = 64
_numbers = itertools.count()

#: Buffers whose rows somebody holds.
_lent: set[Buffer] = set()


class Buffer:
    """One piece of memory. On Linux without a name: the kernel frees it with the last process that maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle = 0  # calls since it was free
        self.forked = False  # a forked child may hold its rows
        self._close: weakref.finalize[..., Any] | None = None
        number = next(_numbers)
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("spec_vllm_compat", os.MFD_CLOEXEC)
            self._close = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self.segment: Segment | None = Segment(number, path, size)
        else:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.segment = None

    def array(self) -> Any:
        """A new uint8 array over all of it; its slices keep it alive, so its end is the end of all use."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def part_at_fork(self) -> None:
        """Make it like any other memory for a child that is about to be forked: each side sees its own writes only."""
        self.forked = True
        if self._close is None or (alive := self._close.peek()) is None:
            return
        place = ctypes.c_void_p(self.array().ctypes.data)
        flags = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED: the same pages at the same address
        if _mmap(place, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, alive[2][0], 0) != place.value:
            raise OSError(ctypes.get_errno(), "mmap of rows before a fork")

    def close(self) -> None:
        if self._close is not None:
            self._close()


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _before_fork() -> None:
    for buffer in list(_lent):
        buffer.part_at_fork()


os.register_at_fork(before=_before_fork)


def _rounded(size: int) -> int:
    """Up to a quarter of a power of two, or calls of unlike length would find no buffer that fits for a long time."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class BufferPool:
    """The buffers of one generator."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self.retired: list[Segment] = []  # closed here; the worker has yet to be told

    def take(self, size: int) -> tuple[Buffer, Any]:
        """A buffer of at least ``size`` bytes, and an array over it.

        The buffer comes back by itself when the array and everything made from it are gone.
        """
        # The smallest that fits, the one used last among equals: the others grow idle and are freed.
        fitting = sorted((b for b in reversed(self._free) if b.size >= size), key=lambda b: b.size)
        if fitting:
            buffer = fitting[0]
            self._free.remove(buffer)
            buffer.idle = 0
        else:
            buffer = Buffer(_rounded(size))
        self._retire()
        array = buffer.array()
        _lent.add(buffer)
        weakref.finalize(array, self._give_back, buffer)
        return buffer, array

    def _give_back(self, buffer: Buffer) -> None:
        _lent.discard(buffer)
        if buffer.forked:  # the child goes on reading it
            self._end(buffer)
        else:
            self._free.append(buffer)

    def _end(self, buffer: Buffer) -> None:
        buffer.close()
        if buffer.segment is not None:
            self.retired.append(buffer.segment)

    def _retire(self) -> None:
        for buffer in list(self._free):
            buffer.idle += 1
            if buffer.idle > IDLE_CALLS:
                self._free.remove(buffer)
                self._end(buffer)
