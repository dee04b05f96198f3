"""Hidden states by Transformers, and the comparison that every numeric test uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: Worst relative L2 error of a row of a random model in float32. Measured: below 2e-6. A row of a neighbouring layer or
#: position is off by more than 0.1 in these models.
FLOAT32 = 1e-4

#: The same in bfloat16 against a float32 run of the same weights. Measured on the random models: below 0.03; Transformers'
#: own bfloat16 run is as far off. Neighbouring layers and positions are off by more than 0.3.
BFLOAT16 = 0.1


class Reference:
    """Transformers in float32, one sequence at a time; the last layer before the final norm."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._seen: dict[int, torch.Tensor] = {}
        layers = self.model.get_decoder().layers if hasattr(self.model, "get_decoder") else self.model.model.layers
        self.num_layers = len(layers)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(lambda _m, _i, out, index=index: self._keep(index, out))

    def _keep(self, index: int, output: Any) -> None:
        self._seen[index] = (output[0] if isinstance(output, tuple) else output).reshape(-1, self.hidden_size).clone()

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> dict[int, torch.Tensor]:
        """Layer id to its output ``[len(ids), hidden_size]``."""
        output = self.model(torch.tensor([list(ids)]), output_hidden_states=True)
        states = dict(self._seen)
        for k in range(self.num_layers - 1):  # layer id k is hidden_states[k + 1]; the last entry there is normed
            assert torch.equal(states[k], output.hidden_states[k + 1][0])
        return states


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Worst relative L2 error of a row."""
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)).max())


def assert_rows(
    result: dict[str, Any], ids: Sequence[int], layer_ids: Sequence[int], reference: Reference, tolerance: float
) -> float:
    """Every row of every layer is the reference's; and this comparison would not pass for other rows.

    Returns the worst row error.
    """
    assert result["input_ids"].tolist() == list(ids)
    assert len(result["hidden_states"]) == len(layer_ids)
    want = reference(ids)
    worst = 0.0
    for layer, got in zip(layer_ids, result["hidden_states"], strict=True):
        assert got.shape == want[layer].shape, f"layer {layer}"
        error = row_error(got, want[layer])
        assert error < tolerance, f"layer {layer}: worst row off by {error:.4f}"
        for other in {layer - 1, layer + 1} & set(want):
            assert row_error(got, want[other]) > tolerance, f"the check cannot tell layer {layer} from {other}"
        if len(ids) > 1:
            assert row_error(got[1:], want[layer][:-1]) > tolerance, "the check cannot tell shifted rows"
        worst = max(worst, error)
    return worst
