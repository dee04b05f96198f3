"""Names of Transformers 4 that ``import speculators`` needs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Completion, PatchSet, Probe, Target

RECORD = Record(
    id="transformers_5",
    kind=Kind.UPSTREAM,
    why=(
        "`import speculators` fails. Its pydantic models inherit from Transformers' configuration class, whose annotations "
        "name `torch`: «PydanticUndefinedAnnotation: name 'torch' is not defined». Its first EAGLE model, which extraction "
        "does not use, imports a mask helper: «No module named 'transformers.modeling_attn_mask_utils'»."
    ),
    changed=(
        "Transformers 5 annotates the configuration class with `torch.dtype` and imports torch for type checkers only; "
        "newer ones drop `modeling_attn_mask_utils`. vLLM 0.24 and newer require Transformers 5."
    ),
    source="transformers/configuration_utils.py in 5.5; speculators 0.3.0 models/eagle.py, line 24",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    transformers=">=5",
    probed_by="whether annotations in transformers.configuration_utils name a `torch` that it does not bind, and whether the mask module exists",
    remove_when="speculators 0.4 and Transformers 5 are no longer used together",
)

CONFIGURATION, MASKS = "transformers.configuration_utils", "modeling_attn_mask_utils"
_added: set[str] = set()


def _torch(module: ModuleType) -> Mapping[str, Any]:
    classes = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    annotations = [str(a) for value in classes for a in getattr(value, "__annotations__", {}).values()]
    if hasattr(module, "torch") or not any("torch." in annotation for annotation in annotations):
        return {}
    import torch

    _added.add(f"{CONFIGURATION}.torch")
    return {"torch": torch}


def _masks(module: ModuleType) -> Mapping[str, Any]:
    name = f"{module.__name__}.{MASKS}"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return {}

    def unavailable(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise CompatError(
            f"expected {name}, which speculators' EAGLE-1 model calls; found a Transformers without it. "
            "Extraction does not need that model; to use it, install transformers<5."
        )

    masks = ModuleType(name, f"Added by spec_vllm_compat: {RECORD.why}")
    masks._prepare_4d_causal_attention_mask = unavailable  # type: ignore[attr-defined]
    _added.add(name)
    return {MASKS: masks}


def _probe(_target: Target) -> Probe:
    return Probe(bool(_added), f"added {', '.join(sorted(_added))}" if _added else "every name is there")


PATCH_SET = PatchSet(
    RECORD,
    _probe,
    lambda _target: (),
    completes=(Completion(CONFIGURATION, _torch), Completion("transformers", _masks)),
)
