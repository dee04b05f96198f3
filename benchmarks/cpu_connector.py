"""vLLM's connector of `extract_hidden_states`, for a machine without CUDA: its streams, events and pinned memory replaced.

vLLM 0.22 and newer copy rows to the host on a CUDA stream, and fail on a CPU ("Found no NVIDIA driver"). The rest stays theirs.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector


class _Event:
    def record(self, _stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    def wait_event(self, _event: _Event) -> None:
        pass


class _Torch:
    """Stands for torch in the connector's module."""

    cuda = SimpleNamespace(Event=_Event, Stream=_Stream, stream=lambda _stream: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: torch.Tensor, **_where: Any) -> torch.Tensor:
        return torch.empty_like(tensor)


connector.torch = _Torch()


class CpuHiddenStatesConnector(connector.ExampleHiddenStatesConnector):
    pass
