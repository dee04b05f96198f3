"""The driver's memory, mapped into the worker that captures."""

from __future__ import annotations

import mmap
import os

import torch

from spec_vllm_compat.protocol import Segment


class Sink:
    """Maps the driver's segments; on CUDA also registers them, so that copies into them run beside the model."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._mapped: dict[int, torch.Tensor] = {}

    def attach(self, segment: Segment) -> str:
        """Map a segment. Returns why it cannot be, or an empty string."""
        if segment.number in self._mapped:  # the driver was interrupted before it heard of it
            return ""
        try:
            descriptor = os.open(segment.path, os.O_RDWR)
            try:
                if os.fstat(descriptor).st_size != segment.size:
                    return f"{segment.path} is not the driver's memory"
                memory = mmap.mmap(descriptor, segment.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            return f"the worker cannot map the driver's memory: {error}"
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self.cuda:
            status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), segment.size, 0))
            if status != 0:
                return f"cudaHostRegister of {segment.size} bytes failed with error {status} (see `ulimit -l`)"
        self._mapped[segment.number] = tensor
        return ""

    def detach(self, segment: Segment) -> None:
        tensor = self._mapped.pop(segment.number, None)
        if tensor is not None and self.cuda:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def memory(self, segment: Segment) -> torch.Tensor:
        """The bytes of an attached segment, uint8 ``[size]``."""
        return self._mapped[segment.number]
