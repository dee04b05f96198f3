"""Host memory for captured rows: mapped by the driver and by the worker that writes it, reused when nobody holds it.

Fresh memory is the slow part of moving rows (1 to 3 GB/s against 50), so a buffer is used again as soon as no tensor that
was handed out refers to it, and not before.
"""

from __future__ import annotations

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


class Buffer:
    """One piece of memory. On Linux without a name: the kernel frees it with the last process that maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle = 0  # calls since it was free
        self._descriptor: int | None = None
        number = next(_numbers)
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("spec_vllm_compat", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, size)
            self._memory = mmap.mmap(self._descriptor, size)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.segment: Segment | None = Segment(number, path, size)
        else:
            self._memory = mmap.mmap(-1, size)
            self.segment = None

    def array(self) -> Any:
        """A new uint8 array over all of it; its slices keep it alive, so its end is the end of all use."""
        return np.frombuffer(self._memory, dtype=np.uint8)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


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
        weakref.finalize(array, self._give_back, buffer)
        return buffer, array

    def _give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def _retire(self) -> None:
        for buffer in list(self._free):
            buffer.idle += 1
            if buffer.idle > IDLE_CALLS:
                self._free.remove(buffer)
                buffer.close()
                if buffer.segment is not None:
                    self.retired.append(buffer.segment)
