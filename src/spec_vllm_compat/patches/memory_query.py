"""speculators asks CUDA for free memory, also where there is none."""

from __future__ import annotations

from typing import Any

import wrapt

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Name, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="memory_query",
    kind=Kind.PLATFORM,
    why=(
        "speculators 0.3 calls `torch.cuda.mem_get_info()` and `torch.cuda.empty_cache()`: «Found no NVIDIA driver». 0.4 asks "
        "`torch.accelerator` and gets 0 bytes or an error, so the KV cache gets no blocks. Where CUDA is available the "
        "original calls are made, as before."
    ),
    changed="never ran without an accelerator",
    source="speculators 0.3.0 vllm_hidden_states_generator.py; speculators 0.4.0 utils/util.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="which of `torch.cuda`, `mem_get_info` and `empty_cache` the generator module binds",
    remove_when="never while machines without a GPU are supported",
)


def _no_cuda() -> bool:
    # Asked when memory is queried, not at import: a process that has looked for CUDA cannot fork workers that use it.
    import torch

    return not torch.cuda.is_available() and not _other_accelerator()


def _other_accelerator() -> bool:
    import torch

    accelerator = getattr(torch, "accelerator", None)
    return accelerator is not None and accelerator.is_available()


def mem_get_info(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
    """Free and total bytes of main memory, which is the device memory of vLLM's CPU platform."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _guarded(original: Any, substitute: Any) -> Any:
    def call(wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return substitute(*args, **kwargs) if _no_cuda() else wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, call)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


class _Cuda(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """``torch.cuda`` as the generator module sees it."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        self._self_mem_get_info = _guarded(wrapped.mem_get_info, mem_get_info)
        self._self_empty_cache = _guarded(wrapped.empty_cache, _nothing)

    @property
    def mem_get_info(self) -> Any:
        return self._self_mem_get_info

    @property
    def empty_cache(self) -> Any:
        return self._self_empty_cache


class _Torch(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """``torch`` as the generator module sees it: the same, but for ``torch.cuda``."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped)
        self._self_cuda = _Cuda(wrapped.cuda)

    @property
    def cuda(self) -> Any:
        return self._self_cuda


def _names(target: Target) -> tuple[str, ...]:
    if target.binds("mem_get_info"):
        return ("mem_get_info", "empty_cache")
    if not target.binds("torch"):
        raise SeamMissing("mem_get_info or torch in the generator module", "neither")
    return ("torch",)


def _probe(target: Target) -> Probe:
    return Probe(True, f"the generator asks {' and '.join(_names(target))}")


def _changes(target: Target) -> tuple[Change, ...]:
    if _names(target) == ("torch",):
        return (Name("torch", lambda t: _Torch(t.bound("torch"))),)
    return (
        Name("mem_get_info", lambda t: _guarded(t.bound("mem_get_info"), mem_get_info)),
        Name("empty_cache", lambda t: _guarded(t.bound("empty_cache"), _nothing)),
    )


PATCH_SET = PatchSet(RECORD, _probe, _changes)
