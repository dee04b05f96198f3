"""Rows against Transformers: the judge of ``verify --against transformers`` and of ``preflight``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_vllm_compat.worker.layers import find_decoder_layers

TOLERANCE = 0.1


@dataclass(frozen=True)
class Comparison:
    """``wrong`` holds (index of the sample, what is wrong)."""

    rows: int
    worst: float
    noise: float | None
    wrong: list[tuple[int, str]]

    @property
    def sentence(self) -> str:
        text = f"{self.rows:,} rows, worst relative error {self.worst:.2g}"
        if self.noise is not None:
            text += f" (Transformers itself, run in the samples' dtype: {self.noise:.2g})"
        return text


def compare(
    model_path: str, samples: Sequence[dict[str, Any]], layer_ids: Sequence[int], tolerance: float
) -> Comparison:
    """Compare rows with a float32 run of the same weights, one sequence at a time.

    In bfloat16 some rows of a real model are off by a fifth, with any engine. Where a row is off by more than
    ``tolerance``, Transformers is run in the dtype of the samples too, and the row may be off by twice what its worst
    row is.
    """
    reference = Reference(model_path)
    exact = [reference(sample["input_ids"], layer_ids) for sample in samples]
    errors = {
        (index, place): row_error(rows, exact[index][layer_ids[place]])
        for index, sample in enumerate(samples)
        for place, rows in enumerate(sample["hidden_states"])
    }
    suspects = sorted({index for (index, _), error in errors.items() if error > tolerance})
    noise, wrong = None, []
    if suspects:
        reference.round_to(samples[0]["hidden_states"][0].dtype)
    for index in suspects:
        rounded = reference(samples[index]["input_ids"], layer_ids)
        for place, rows in enumerate(samples[index]["hidden_states"]):
            layer, want = layer_ids[place], exact[index]
            own = row_error(rounded[layer], want[layer])
            noise = max(noise or 0.0, own)
            allowed = max(tolerance, 2 * own)
            if errors[index, place] > allowed:
                others = [other for other in want if other != layer and row_error(rows, want[other]) <= allowed]
                found = f"holds layer {others[0]}" if others else f"has a row off by {errors[index, place]:.2f}"
                wrong.append((index, f"layer {layer} {found}, allowed {allowed:.2f}"))
    rows = sum(len(sample["input_ids"]) * len(sample["hidden_states"]) for sample in samples)
    return Comparison(rows, max(errors.values()), noise, wrong)


class Reference:
    """Outputs of decoder blocks by Transformers, one sequence at a time; the last one before the final norm."""

    def __init__(self, model_path: str) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(model_path)
        # A vision wrapper is no AutoModelForCausalLM.
        cls = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        self.model = cls.from_pretrained(model_path, dtype=torch.float32).eval()
        self._seen: dict[int, torch.Tensor] = {}
        _, layers = find_decoder_layers(self.model, config.get_text_config().num_hidden_layers)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(lambda _module, _args, output, index=index: self._keep(index, output))

    def round_to(self, dtype: torch.dtype) -> None:
        """Weights to ``dtype``; buffers stay, or rotary embeddings would be rounded, which no engine does."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def _keep(self, index: int, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        self._seen[index] = rows.reshape(-1, rows.shape[-1]).clone()

    def __call__(self, ids: torch.Tensor, layers: Sequence[int]) -> dict[int, torch.Tensor]:
        self._seen.clear()
        with torch.no_grad():
            self.model(input_ids=ids[None], use_cache=False)
        return {layer: rows for layer, rows in self._seen.items() if layer in layers}


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Worst relative L2 error of a row."""
    if got.shape != want.shape:
        return float("inf")
    return float(((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-6)).max())
