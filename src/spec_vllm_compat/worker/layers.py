"""Where the decoder layers of a model are, and what their output means."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class CaptureError(RuntimeError):
    """The model's rows cannot be captured; the message says what was found."""


def find_decoder_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The module list of the ``count`` decoder layers, and its name.

    Found by structure: the outermost :class:`torch.nn.ModuleList` of that length. Where several qualify (a vision tower
    of the same depth), the language model's own wins if vLLM says which part that is.

    Raises:
        CaptureError: no list qualifies, or several do; the message names them.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = {name: module for name, module in lists.items() if len(module) == count}
    outermost = {
        name: module
        for name, module in fitting.items()
        if not any(name.startswith(f"{other}.") for other in fitting if other != name)
    }
    if len(outermost) > 1 and hasattr(model, "get_language_model"):
        language_model = set(map(id, model.get_language_model().modules()))
        outermost = {name: module for name, module in outermost.items() if id(module) in language_model}
    if len(outermost) != 1:
        seen = ", ".join(f"{name} ({len(module)})" for name, module in lists.items() if len(module) > 1) or "none"
        raise CaptureError(
            f"expected one list of {count} decoder layers in {type(model).__name__}; "
            f"found {sorted(outermost) or 'none'} among module lists {seen}"
        )
    return next(iter(outermost.items()))


def residual_stream(output: Any, out: torch.Tensor, rows: int) -> torch.Tensor:
    """First ``rows`` rows of the residual stream after a decoder layer, before the final norm.

    Args:
        output: what the layer returned: ``(hidden, residual)``, ``(hidden, None)`` or the stream itself, each
            ``[tokens, hidden_size]``.
        out: ``[rows, hidden_size]`` to write into.
        rows: number of rows that belong to requests; padding comes after them.

    Raises:
        CaptureError: the output has another form.
    """
    hidden, residual = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    tensors = [part for part in (hidden, residual) if part is not None]
    if not tensors or any(not isinstance(t, torch.Tensor) or t.dim() != 2 or len(t) < rows for t in tensors):
        form = [tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors]
        raise CaptureError(
            f"expected a layer output of [tokens >= {rows}, hidden_size], with or without residual; found {form}"
        )
    if residual is None:
        return out.copy_(hidden[:rows])
    if hidden.shape != residual.shape or hidden.dtype is not residual.dtype:
        raise CaptureError(
            f"hidden states {hidden.dtype} {tuple(hidden.shape)} and residual {residual.dtype} {tuple(residual.shape)} differ"
        )
    return torch.add(hidden[:rows], residual[:rows], out=out)
