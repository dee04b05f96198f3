"""Rows against Transformers: the judge of ``verify --against transformers`` and of ``preflight``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spec_vllm_compat.cli.progress import counted
from spec_vllm_compat.worker.layers import find_decoder_layers

#: Relative error of a row that is always let pass.
TOLERANCE = 0.1

#: Times as far off as Transformers' own run in the samples' dtype that a row may be, where that is more. A trained model
#: has rows whose rounding errors grow a hundredfold in one block. Seen with SmolLM2 in bfloat16 on a CPU without AVX-512:
#: one row of 920 off by 0.128, by 0.046 with Transformers, by 0.006 in the median. Never more than ``CLEARLY_WRONG``.
ROUNDING = 4
CLEARLY_WRONG = 0.3


def compare(
    model_path: str, samples: Sequence[dict[str, Any]], layer_ids: Sequence[int], *, trust_remote_code: bool = False
) -> tuple[str, list[tuple[int, str]]]:
    """Compare rows with a float32 run of the same weights, one sequence at a time.

    Returns a sentence, and what is wrong: (index of the sample, text).

    In bfloat16 some rows are far off with any engine: large activations, or another expert chosen between two close
    ones. So where rows are beyond ``TOLERANCE``, Transformers is run in the dtype of the samples too. A row that is far
    off there as well may be off ``ROUNDING`` times as much; of the others, twice as many and three more as it has in
    that layer are let pass, none where it has none, and never most rows of one sample. Rows of another token, request or
    layer are far off all together.
    """
    reference = Reference(model_path, trust_remote_code=trust_remote_code)
    exact = [reference(sample["input_ids"], layer_ids) for sample in samples]
    errors = [
        [row_errors(rows, want[layer]) for layer, rows in zip(layer_ids, sample["hidden_states"], strict=True)]
        for sample, want in zip(samples, exact, strict=True)
    ]
    every = torch.cat([rows for places in errors for rows in places])
    wrong: list[tuple[int, str]] = []
    far = own_far = 0
    if bool((every > TOLERANCE).any()):
        reference.round_to(samples[0]["hidden_states"][0].dtype)
        rounded = [reference(sample["input_ids"], layer_ids) for sample in samples]
        for place, layer in enumerate(layer_ids):
            rounding = [row_errors(low[layer], want[layer]) for low, want in zip(rounded, exact, strict=True)]
            theirs = [_beyond(rows) for rows in rounding]
            far, own_far = far + sum(_beyond(places[place]) for places in errors), own_far + sum(theirs)
            limits = [(ROUNDING * rows).clamp(TOLERANCE, CLEARLY_WRONG) for rows in rounding]
            ours = [_beyond(places[place], limit) for places, limit in zip(errors, limits, strict=True)]
            too_many = sum(ours) > (2 * sum(theirs) + 3 if sum(theirs) else 0)
            wrong += [
                (index, _wrong(samples[index]["hidden_states"][place], exact[index], layer, count))
                for index, count in enumerate(ours)
                if count and (too_many or count > max(len(rounding[index]) // 2, 2 * theirs[index], 3))
            ]
    text = f"{counted(len(every), 'row')}, relative error {every.median():.2g} (median), {every.max():.2g} (worst)"
    if far:
        text += f"; {counted(far, 'row')} off by more than {TOLERANCE}, {own_far:,} of Transformers' own run in the samples' dtype"
    return text, wrong


def _beyond(errors: torch.Tensor, limit: torch.Tensor | float = TOLERANCE) -> int:
    return int((errors > limit).sum())


def _wrong(rows: torch.Tensor, want: dict[int, torch.Tensor], layer: int, count: int) -> str:
    for other, other_rows in want.items():
        if other != layer and float(row_errors(rows, other_rows).median()) <= TOLERANCE:
            return f"layer {layer} holds layer {other}"
    worst = float(row_errors(rows, want[layer]).max())
    return f"layer {layer} has {count} of {counted(len(rows), 'row')} off by up to {worst:.2f}"


class Reference:
    """Outputs of decoder blocks by Transformers, one sequence at a time; the last one before the final norm."""

    def __init__(self, model_path: str, *, trust_remote_code: bool) -> None:
        import transformers

        # Said in any case: left open, Transformers asks on the terminal.
        trust = {"trust_remote_code": trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(model_path, **trust)
        # A vision wrapper is no AutoModelForCausalLM.
        cls = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        self.model = cls.from_pretrained(model_path, dtype=torch.float32, **trust).eval()
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


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of every row."""
    if got.shape != want.shape:
        return torch.full((len(want),), float("inf"))
    errors = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-6)
    return errors.nan_to_num(nan=float("inf"))
