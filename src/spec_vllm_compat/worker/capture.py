"""Captures the rows of one scheduler step at a time, attributed to requests from the batch that really ran."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from spec_vllm_compat.protocol import Capturing, Chunk, Step
from spec_vllm_compat.worker.layers import CaptureError, find_decoder_layers, residual_stream


class Capture:
    """Hooks on the target decoder layers of one worker's model.

    The buffer on the device holds one step: ``[layers, max_num_batched_tokens, hidden_size]`` in the model's dtype.

    Args:
        worker: vLLM's worker, its model loaded.
        layer_ids: decoder layers to capture, ascending.
        keep: whether this rank keeps rows; all tensor parallel ranks compute the same, so only rank 0 does.
    """

    def __init__(self, worker: Any, layer_ids: Sequence[int], keep: bool) -> None:
        self._runner = worker.model_runner
        config = worker.vllm_config
        self._capacity = config.scheduler_config.max_num_batched_tokens
        self._keep = keep
        self._buffer: torch.Tensor | None = None
        self._rows = 0  # rows of the step that is running; 0 outside of a step, where nothing is captured
        self._calls = [0] * len(layer_ids)
        self._inputs: dict[str, Any] = {}
        model = _unwrapped(self._runner)
        container, layers = find_decoder_layers(model, config.model_config.hf_text_config.num_hidden_layers)
        self._handles = [
            layers[layer].register_forward_hook(partial(self._on_layer, index)) for index, layer in enumerate(layer_ids)
        ]
        self._handles.append(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        self.capturing = Capturing(container, tuple(layer_ids))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_model(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if self._rows:
            self._inputs = {name: kwargs.get(name) for name in ("input_ids", "positions")}

    def _on_layer(self, index: int, _module: Any, _args: Any, output: Any) -> None:
        if not self._rows:
            return
        self._calls[index] += 1
        if not self._keep:
            return
        if self._buffer is None:
            sample = output[0] if isinstance(output, tuple) else output
            shape = (len(self._calls), self._capacity, sample.shape[-1])
            self._buffer = torch.empty(shape, dtype=sample.dtype, device=sample.device)
        residual_stream(output, self._buffer[index, : self._rows], self._rows)

    def step(self, worker: Any, scheduler_output: Any) -> Step:
        """Execute one scheduler step and return its rows.

        Raises:
            CaptureError: a target layer did not run exactly once, or the batch is not the one that was scheduled.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        self._rows = scheduler_output.total_num_scheduled_tokens
        self._calls = [0] * len(self._calls)
        self._inputs = {}
        try:
            worker.execute_model(scheduler_output)
            if not scheduled:
                return Step()
            chunks = _chunks(_batch_order(self._runner), scheduler_output)
            if set(self._calls) != {1}:
                raise CaptureError(
                    f"expected each target layer to run once a step; layers {self.capturing.layer_ids} ran {self._calls} times"
                )
            return self._collect(chunks)
        finally:
            self._rows = 0
            finish_two_phase(worker)

    def _collect(self, chunks: tuple[Chunk, ...]) -> Step:
        calls = tuple(self._calls)
        if not self._keep or self._buffer is None:
            return Step(chunks, layer_calls=calls)
        rows = self._buffer[:, : self._rows]
        peaks = row_peaks(rows)
        return Step(
            chunks,
            rows=rows.cpu().contiguous().view(torch.uint8).numpy(),
            dtype=str(rows.dtype).removeprefix("torch."),
            peaks=peaks.cpu().numpy(),
            token_ids=self._input("input_ids"),
            positions=self._input("positions"),
            layer_calls=calls,
        )

    def _input(self, name: str) -> Any:
        value = self._inputs.get(name)
        if value is None or value.dim() != 1:
            return None
        return value[: self._rows].to("cpu", torch.int64).numpy()


def row_peaks(rows: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row ``[..., hidden_size]``, float32 on the same device; NaN where a row holds one."""
    # Two passes, but no temporary of the size of the rows; on CPU seven times as fast as `vector_norm(ord=inf)`.
    return torch.maximum(rows.amax(dim=-1), -rows.amin(dim=-1)).float()


def finish_two_phase(worker: Any) -> None:
    """End the step that ``execute_model`` left open, without sampling where that is safe (patch set two_phase)."""
    runner = worker.model_runner
    if getattr(runner, "execute_model_state", None) is None:
        return
    if hasattr(runner, "input_batch"):  # model runner V1: the state is only input for the sampler
        runner.execute_model_state = None
        runner.kv_connector_output = None
    else:  # model runner V2: counters of computed tokens advance in sample_tokens
        worker.sample_tokens(None)


def _unwrapped(runner: Any) -> torch.nn.Module:
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    while hasattr(model, "unwrap"):
        model = model.unwrap()
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"expected a torch.nn.Module as model; found {type(model).__name__}")
    return model


def _batch_order(runner: Any) -> list[str]:
    """Request ids in the order of the batch that has just run, padding left out."""
    batch = getattr(runner, "input_batch", None)
    if batch is None:  # model runner V2 keeps it on the state of the step: a tuple up to 0.17, then a named tuple
        state = runner.execute_model_state
        batch = getattr(state, "input_batch", None) or next((part for part in state if hasattr(part, "req_ids")), None)
    if batch is None:
        raise CaptureError("expected the model runner to keep the batch it ran; found none")
    return list(batch.req_ids)


def _chunks(order: list[str], scheduler_output: Any) -> tuple[Chunk, ...]:
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    starts = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    if set(order) != set(scheduled) or set(starts) != set(scheduled) or len(order) != len(scheduled):
        raise CaptureError(f"scheduled {sorted(scheduled)}, but the model ran {order}")
    return tuple(Chunk(request_id, starts[request_id], scheduled[request_id]) for request_id in order)
