"""Where the decoder layers of a model are, and which of the tensors that they return are the residual stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn


class CaptureError(RuntimeError):
    """The model's rows cannot be captured; the message says what was found."""


class Meaning(str, Enum):
    """What the output of a decoder layer is. Known once the first step has run."""

    TENSOR = "hidden"  # nothing else is returned
    SUM = "hidden + residual"
    HIDDEN = "hidden, which includes the returned residual"


def find_decoder_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The module list of the ``count`` decoder layers, and its name.

    Found by structure: the outermost :class:`torch.nn.ModuleList` of that length. Where several qualify (a vision tower
    of the same depth), the language model's own wins if vLLM says which part that is.

    Raises:
        CaptureError: no list qualifies, or several do; the message names them.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = {name: module for name, module in lists.items() if len(module) == count}
    first = {tuple(map(id, module)): name for name, module in reversed(fitting.items())}
    fitting = {
        name: fitting[name] for name in fitting if name in first.values()
    }  # Gemma 3n has slices of its list, too
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


def returned(output: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The hidden states that a decoder layer returns, and what may be a residual to add; each ``[tokens, hidden_size]``.

    Args:
        output: a tensor, or a tuple that begins with one. A leading dimension of 1 (Transformers' own model code inside
            vLLM) is dropped.
        rows: number of rows that belong to requests; padding comes after them.

    Raises:
        CaptureError: the output has another form: several streams, fewer rows than tokens, parts that do not fit.
    """
    hidden, *others = output if isinstance(output, tuple) and output else (output,)
    hidden = _flat(hidden)
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        raise CaptureError(
            f"expected a layer to return one residual stream [tokens, hidden_size]; found {_form(output)}"
        )
    width = hidden.shape[-1]
    parts = [part for part in map(_flat, others) if isinstance(part, torch.Tensor) and part.shape[-1:] == (width,)]
    nested = [part for other in others if not isinstance(other, torch.Tensor) for part in _tensors(other)]
    if len(hidden) < rows:
        raise CaptureError(
            f"expected a layer to return a row for each of {rows} tokens; found {_form(output)}. Are the layers' outputs "
            "sharded over ranks (sequence parallelism: expert parallel with data parallel)? Turn that off."
        )
    unlike = any(part.shape != hidden.shape or part.dtype is not hidden.dtype for part in parts)
    if len(parts) > 1 or unlike or any(part.shape == hidden.shape for part in nested):
        raise CaptureError(f"expected hidden states and at most one residual like them; found {_form(output)}")
    return hidden, parts[0] if parts else None


def _flat(part: Any) -> Any:
    return part[0] if isinstance(part, torch.Tensor) and part.dim() == 3 and len(part) == 1 else part


def _form(output: Any) -> str:
    parts = output if isinstance(output, tuple) else (output,)
    return ", ".join(
        f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
        if isinstance(part, torch.Tensor)
        else type(part).__name__
        for part in parts
    )


class Usage:
    """Finds out, in one step, whether a returned residual is still to be added: by what the model does with it.

    Most layers return ``(hidden, residual)`` whose sum is the stream. Others (Cohere, StableLM, EXAONE 4, Granite 4,
    Phi-MoE in vLLM 0.16) return the same form with the residual added already, and nobody reads it again: there the sum
    is a plausible wrong number. What the model makes of the last layer's two tensors tells them apart:

    * a module takes both (the final norm): two calls on made-up rows show whether it adds them;
    * a module takes the first alone, or it is what the model returns: the first is the stream;
    * a module takes their sum, or it is what the model returns: the sum is.

    Args:
        model: the whole model.
        container: name of the list of decoder layers in it.
        layers: that list.
        running: whether the step that runs is one whose rows are captured.
    """

    def __init__(self, model: nn.Module, container: str, layers: nn.ModuleList, running: Callable[[], bool]) -> None:
        self.meaning: Meaning | None = None
        self._running = running
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._handles = [layers[-1].register_forward_hook(self._on_last_layer)]
        inside = set(map(id, layers.modules()))
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            if name == "" or container.startswith(f"{name}."):
                self._handles.append(module.register_forward_hook(self._on_return))
            else:
                self._handles.append(module.register_forward_pre_hook(self._on_use, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Let go of the tensors of a step that is over."""
        self._parts = None

    def settled(self) -> Meaning:
        """The meaning; call it after the step.

        Raises:
            CaptureError: the model did nothing with the tensors that tells it.
        """
        if self.meaning is None:
            raise CaptureError(
                "expected the model to add, or to ignore, the second tensor that its decoder layers return; found no use of "
                "it that tells. The stream could be either tensor, their sum, or need a sum over ranks first (DeepSeek-V3.2 in "
                "vLLM 0.32 with tensor parallelism), so nothing is returned. Please report the model."
            )
        return self.meaning

    def _on_last_layer(self, _module: Any, _args: Any, output: Any) -> None:
        if self._running():
            hidden, residual = returned(output, 0)
            self._parts = None if residual is None else (hidden, residual)

    def _on_return(self, _module: Any, _args: Any, output: Any) -> None:
        if self._parts is not None:
            roles = [self._role(part) for part in _tensors(output)]
            if 1 not in roles:  # a decoder within the model returns both; what its caller does with them tells
                self._settle(roles)

    def _on_use(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._parts is None:
            return
        roles = [self._role(part) for part in _tensors((args, kwargs))]
        if roles.count(0) == 1 and roles.count(1) == 1:
            parts, self._parts = self._parts, None  # the calls below come by here again
            roles = [_what_it_takes(module, args, kwargs, parts)]
            self._parts = parts
        self._settle(roles)

    def _role(self, tensor: torch.Tensor) -> int | Meaning | None:
        """0 or 1 for a returned tensor itself, SUM for their sum, None for anything else."""
        assert self._parts is not None
        for index, part in enumerate(self._parts):
            if tensor.data_ptr() == part.data_ptr() and tensor.numel() == part.numel():
                return index
        hidden, residual = self._parts
        tensor = _flat(tensor)
        same = tensor.shape == hidden.shape and tensor.dtype is hidden.dtype
        return Meaning.SUM if same and torch.equal(tensor, hidden + residual) else None

    def _settle(self, roles: list[int | Meaning | None]) -> None:
        seen = set(roles) - {None}
        if not seen:
            return
        if seen == {Meaning.SUM}:
            self.meaning = Meaning.SUM
        elif seen in ({0}, {Meaning.HIDDEN}):
            self.meaning = Meaning.HIDDEN
        self._parts = None  # the first use decides; one that does not tell leaves the meaning open
        self.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _what_it_takes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parts: tuple[torch.Tensor, torch.Tensor]
) -> Meaning | None:
    """Whether a norm that is given hidden states and residual adds them or ignores the residual."""
    width = parts[0].shape[-1]
    angles = torch.arange(2 * width, device=parts[0].device, dtype=torch.float32)
    hidden, residual = (torch.sin(angles * step).view(2, width).to(parts[0].dtype) for step in (1.0, 2.3))

    def call(*values: torch.Tensor) -> torch.Tensor:
        def replaced(value: Any) -> Any:
            for part, new in zip(parts, values, strict=True):
                if isinstance(value, torch.Tensor) and value.data_ptr() == part.data_ptr():
                    return new.clone().view(*value.shape[:-2], *new.shape)  # norms write into what they are given
            return value

        output = module(*map(replaced, args), **{name: replaced(value) for name, value in kwargs.items()})
        return next(_tensors(output)).float()

    def near(one: torch.Tensor, other: torch.Tensor) -> bool:
        return float((one - other).norm()) < 0.05 * float(one.norm())

    zeros = torch.zeros_like(hidden)
    both, summed, alone = call(hidden, residual), call(hidden + residual, zeros), call(hidden, zeros)
    if near(both, summed) is near(both, alone):
        return None
    return Meaning.SUM if near(both, summed) else Meaning.HIDDEN


def float16_factor(layer: nn.Module, dtype: torch.dtype) -> float:
    """What the rows of a layer must be multiplied with to be the residual stream; 1 for nearly all models.

    DeepSeek's layers and their relatives divide the whole stream by ``routed_scaling_factor`` in float16, against
    overflow (vllm/model_executor/models/deepseek_v2.py line 1010 in 0.16.0); norms do not see it, rows do.

    Raises:
        CaptureError: the layer does something of its own in float16, and it is not that.
    """
    if dtype is not torch.float16 or "torch.float16" not in inspect.getsource(type(layer).forward):
        return 1.0
    factor = getattr(layer, "routed_scaling_factor", None)
    if not isinstance(factor, (int, float)):
        raise CaptureError(
            f"expected layers that compute the same in float16; found that {type(layer).__name__} has code of its own for it. "
            'Use bfloat16: set "dtype" in the model\'s config.json.'
        )
    return float(factor)
