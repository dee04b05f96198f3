"""Random weights made inside vLLM, where no checkpoint can be written: quantised, unknown to Transformers, full size.

vLLM's own dummy weights (within 0.001 of zero) leave every row little more than the embedding of its token, and no
comparison would see a fault. These keep the size of a row from layer to layer, and equal seeds give equal weights.
"""

from __future__ import annotations

import torch
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from spec_vllm_compat.cli.logprobs import FORMAT

#: Scale of a quantised weight, so that what it stands for has about the size of one drawn by :func:`randomise`.
SCALES = {torch.float8_e4m3fn: 0.04, torch.int8: 6e-4, torch.int32: 0.01}


class RandomWeights(LoadConfig):
    """Unpickled in a worker, it brings this module with it, and so the loader."""


@register_model_loader(FORMAT)
class RandomLoader(DummyModelLoader):
    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:  # noqa: ARG002
        with torch.no_grad():
            randomise(model)


def randomise(model: torch.nn.Module) -> None:
    """Fill all parameters, before vLLM packs them for its kernels. Names are those of the usual checkpoint formats."""
    for number, (name, weight) in enumerate(sorted(model.named_parameters())):
        module, _, leaf = name.rpartition(".")
        if weight.is_meta or leaf in ("k_scale", "v_scale", "q_scale", "prob_scale"):  # left to vLLM
            continue
        random = torch.Generator(weight.device).manual_seed(number)
        if "scale" in leaf and weight.dtype == torch.uint8:  # of MXFP4: the exponent of a power of two, plus 127
            weight.fill_(121)
        elif "scale" in leaf and weight.is_floating_point():
            beside = {parameter.dtype for parameter in model.get_submodule(module).parameters(recurse=False)}
            weight.fill_(next((scale for dtype, scale in SCALES.items() if dtype in beside), 0.04))
        elif not weight.is_floating_point():
            if leaf.endswith(("g_idx", "weight_shape")):
                weight.zero_()
            else:
                limits = torch.iinfo(weight.dtype)
                weight.random_(limits.min, limits.max, generator=random)
        elif weight.dim() < 2:
            weight.normal_(0.0 if "bias" in leaf else 1.0, 0.1, generator=random)
        elif weight.dtype.itemsize < 2:
            drawn = torch.empty(weight.shape, dtype=torch.float16, device=weight.device)
            weight.copy_(drawn.normal_(generator=random).clamp_(-3, 3))
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=random)
