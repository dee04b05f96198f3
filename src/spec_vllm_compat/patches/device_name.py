"""The name of the device, for the configuration that speculators 0.4 writes beside the data."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import wrapt

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Name, PatchSet, Probe, Target

MODULE = "speculators.data_generation.config_generator"
NAME = "get_device_name"

RECORD = Record(
    id="device_name",
    kind=Kind.PLATFORM,
    why=(
        "`DataGenerationConfig.from_generator`, the last step of speculators' own script, asks a CUDA build of torch for "
        "the name of device 0: «Found no NVIDIA driver», after all the work. Where a device is there, the original call "
        "is made."
    ),
    changed="speculators 0.3 asked `torch.cuda.is_available()` first; 0.4 takes `torch.accelerator`'s word, which a build gives without a device",
    source="speculators 0.4.0 data_generation/config_generator.py `_get_gpu_info`, utils/util.py `get_device_name`",
    vllm=">=0.11",
    speculators=">=0.4,<0.5",
    probed_by=f"whether `{MODULE}` binds `{NAME}`",
    remove_when="never while machines without a GPU are supported",
)


def _name(wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    # speculators writes «CPU ONLY» for this name.
    return wrapped(*args, **kwargs) if torch.accelerator.is_available() else "NO ACCELERATOR"


def _original() -> Any:
    try:
        return getattr(import_module(MODULE), NAME, None)
    except ModuleNotFoundError:
        return None


def _probe(_target: Target) -> Probe:
    needed = _original() is not None
    return Probe(needed, f"the configuration writer {'asks for' if needed else 'does not ask for'} the device's name")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Name(NAME, lambda _target: wrapt.FunctionWrapper(_original(), _name), module=MODULE),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
