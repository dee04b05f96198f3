"""Captures the rows of one scheduler step at a time, attributed to requests from the batch that really ran."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from spec_vllm_compat.protocol import Capturing, Chunk, Inline, Layout, Segment, Step
from spec_vllm_compat.worker.layers import CaptureError, Meaning, Usage, find_decoder_layers, float16_factor, returned
from spec_vllm_compat.worker.recurrent import clear_states
from spec_vllm_compat.worker.sink import Sink

SAMPLES = 8  # values a layer


class Capture:
    """Hooks on the target decoder layers of one worker's model.

    The buffer on the device holds one step: ``[layers, max_num_batched_tokens, hidden_size]`` in the model's dtype; in the
    very first step the residuals of these layers are kept beside it. On CUDA
    a step is copied out on a stream of its own, while the next one runs up to its first target layer.

    Args:
        worker: vLLM's worker, its model loaded.
        layer_ids: decoder layers to capture, ascending.
        sink: the driver's memory, as far as this worker has mapped it.
        keep: whether this rank keeps rows; all tensor parallel ranks compute the same, so only rank 0 does.
    """

    def __init__(self, worker: Any, layer_ids: Sequence[int], sink: Sink, keep: bool) -> None:
        self._runner = worker.model_runner
        config = worker.vllm_config
        self._capacity = config.scheduler_config.max_num_batched_tokens
        self._keep = keep
        self._buffer: torch.Tensor | None = None
        self._rows = 0  # rows of the step that is running; 0 outside of a step, where nothing is captured
        self._calls = [0] * len(layer_ids)
        self._inputs: dict[str, Any] = {}
        self._layout: Layout | None = None
        model = _unwrapped(self._runner)
        container, layers = find_decoder_layers(model, config.model_config.hf_text_config.num_hidden_layers)
        self._handles = [
            layers[layer].register_forward_hook(partial(self._on_layer, index)) for index, layer in enumerate(layer_ids)
        ]
        self._factors = [float16_factor(layers[layer], config.model_config.dtype) for layer in layer_ids]
        self._usage = Usage(model, container, layers, lambda: self._rows > 0)
        self._residuals: dict[int, torch.Tensor] = {}  # of the first step, until it is known whether they are added
        self._first = True
        self._samples: list[float] = []
        self.meaning = Meaning.TENSOR
        self._handles.append(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        self.sink = sink
        self._copies = _Copies() if sink.cuda else None
        self.capturing = Capturing(container, tuple(layer_ids))

    def remove(self) -> Sink:
        """Take the hooks off; returns the sink for the next capture."""
        self.finish()
        self._usage.remove()
        for handle in self._handles:
            handle.remove()
        return self.sink

    def attach(self, segment: Segment | None, retired: Sequence[Segment]) -> str:
        """Map the driver's memory; returns why it cannot be, or an empty string."""
        for old in retired:
            self.sink.detach(old)
        return self.sink.attach(segment) if self._keep and segment is not None else ""

    def finish(self) -> None:
        """Wait until every row is where it belongs."""
        if self._copies is not None:
            self._copies.wait_for_copies()

    def _on_model(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if self._rows:
            self._inputs = {name: kwargs.get(name) for name in ("input_ids", "positions")}

    def _on_layer(self, index: int, _module: Any, _args: Any, output: Any) -> None:
        if not self._rows:
            return
        self._calls[index] += 1
        if not (self._keep or self._first):
            return
        hidden, residual = returned(output, self._rows)
        if self._first:
            self._samples += hidden[0, :SAMPLES].float().tolist()
        if not self._keep:
            return
        if self._buffer is None:
            shape = (len(self._calls), self._capacity, hidden.shape[-1])
            self._buffer = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        if self._copies is not None:
            self._copies.before_buffer_is_written()
        rows = self._buffer[index, : self._rows]
        if residual is not None and self._usage.meaning is Meaning.SUM:
            torch.add(hidden[: self._rows], residual[: self._rows], out=rows)
        else:
            rows.copy_(hidden[: self._rows])
        if residual is not None and self._usage.meaning is None:
            self._residuals[index] = residual[: self._rows].clone()
        elif self._factors[index] != 1:
            rows.mul_(self._factors[index])

    def _settle_meaning(self) -> None:
        """After the first step: add what was kept, now that the model has shown whether it is to be added."""
        residuals, self._residuals = self._residuals, {}
        if residuals:
            self.meaning = self._usage.settled()
        self._usage.remove()
        self._first = False
        for index, residual in residuals.items():
            assert self._buffer is not None
            with torch.inference_mode():  # in which the buffer was made
                rows = self._buffer[index, : self._rows]
                if self.meaning is Meaning.SUM:
                    rows.add_(residual)
                if self._factors[index] != 1:
                    rows.mul_(self._factors[index])

    def step(self, worker: Any, scheduler_output: Any, layout: Layout | None) -> Step:
        """Execute one scheduler step; its rows go to the driver's memory or into the reply.

        Args:
            worker: vLLM's worker.
            scheduler_output: the scheduler's step.
            layout: where rows belong, with the first step of a call; None for the later ones.

        Raises:
            CaptureError: a target layer did not run exactly once, the batch is not the one that was scheduled, rows are
                not of the width and dtype that the layout says, or it is not known which returned tensor is the stream.
        """
        if layout is not None:
            self._layout = layout
        if self._copies is not None:
            self._copies.wait_for_model()
        scheduled = scheduler_output.num_scheduled_tokens
        self._rows = scheduler_output.total_num_scheduled_tokens
        self._calls = [0] * len(self._calls)
        self._inputs = {}
        try:
            clear_states(worker, scheduler_output)
            worker.execute_model(scheduler_output)
            if not scheduled:
                return Step()
            chunks = _chunks(_batch_order(self._runner), scheduler_output)
            require_mla_context_in_place(getattr(self._runner, "execute_model_state", None), chunks)
            if set(self._calls) != {1}:
                raise CaptureError(
                    f"expected each target layer to run once a step; layers {self.capturing.layer_ids} ran {self._calls} times"
                )
            self._settle_meaning()
            return self._collect(chunks)
        finally:
            self._rows = 0
            self._residuals.clear()
            self._samples = []
            self._usage.forget()
            finish_two_phase(worker)

    def _collect(self, chunks: tuple[Chunk, ...]) -> Step:
        calls = tuple(self._calls)
        samples, self._samples = tuple(self._samples), []
        if not self._keep or self._buffer is None or self._layout is None:
            return Step(chunks, calls, samples=samples)
        layout, rows = self._layout, self._buffer[:, : self._rows]
        dtype = str(rows.dtype).removeprefix("torch.")
        if (rows.shape[-1], dtype) != (layout.hidden_size, layout.dtype):
            raise CaptureError(
                f"expected rows of {layout.hidden_size} {layout.dtype} values, as the model's configuration says; "
                f"found {rows.shape[-1]} {dtype}"
            )
        peaks = row_peaks(rows)
        token_ids, positions = self._input("input_ids"), self._input("positions")
        inline = None
        if layout.segment is None:
            inline = Inline(
                rows.cpu().contiguous().view(torch.uint8).numpy(),
                peaks.cpu().numpy(),
                *(None if values is None else values.cpu().numpy() for values in (token_ids, positions)),
            )
        else:
            pairs = _places(self.sink.memory(layout.segment), layout, chunks, rows, peaks, token_ids, positions)
            if self._copies is None:
                for there, here in pairs:
                    there.copy_(here)
            else:
                self._copies.copy(pairs)
        return Step(chunks, calls, token_ids is not None, positions is not None, inline, samples)

    def _input(self, name: str) -> torch.Tensor | None:
        value = self._inputs.get(name)
        if value is None or value.dim() != 1:
            return None
        # A copy: vLLM writes the next step's inputs into the same tensor.
        return value[: self._rows].to(torch.int64, copy=True)


class _Copies:
    """Copies from the device on a stream of their own, in order with the model's."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._computed = torch.cuda.Event()
        self._copied = torch.cuda.Event()
        self._sources: list[torch.Tensor] = []  # kept until the model's stream has waited for the copies

    def wait_for_model(self) -> None:
        """Before a step: vLLM reuses the host memory from which the previous step's inputs are copied."""
        self._computed.synchronize()

    def before_buffer_is_written(self) -> None:
        if self._sources:
            torch.cuda.current_stream().wait_event(self._copied)
            self._sources.clear()

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._computed.record()
        self._sources = [here for _, here in pairs]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            self._copied.record()

    def wait_for_copies(self) -> None:
        self._copied.synchronize()


def _places(
    memory: torch.Tensor,
    layout: Layout,
    chunks: Sequence[Chunk],
    rows: torch.Tensor,
    peaks: torch.Tensor,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a place in the driver's memory and the tensor that belongs there."""
    tokens = layout.tokens

    def place(offset: int, like: torch.Tensor) -> torch.Tensor:
        return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    pairs = []
    begin = 0
    for chunk in chunks:
        here = slice(begin, begin + chunk.rows)
        before, own = layout.requests[chunk.request_id]
        at = before + chunk.start
        for layer in range(layout.layers):
            offset = layout.rows_at(before, own, layer, chunk.start)
            pairs.append((place(offset, rows[layer, here]), rows[layer, here]))
            pairs.append((place(layout.peaks_at + 4 * (layer * tokens + at), peaks[layer, here]), peaks[layer, here]))
        if token_ids is not None:
            pairs.append((place(layout.token_ids_at + 8 * at, token_ids[here]), token_ids[here]))
        if positions is not None:
            pairs.append((place(layout.positions_at + 8 * at, positions[here]), positions[here]))
        begin += chunk.rows
    return pairs


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


def require_mla_context_in_place(state: Any, chunks: Sequence[Chunk]) -> None:
    """Refuse a step in which MLA left out the earlier part of a prompt.

    Of the sequences that vLLM does not take as decoding, MLA gives the earlier part of the prompt to the first
    ``prefill_tokens_with_context`` tokens (vLLM 0.20 to 0.27, mla_attention.py). Model runner V2 sorts a batch by length, so
    a new prompt can come before the rest of an older one, which is then computed without its beginning: rows off by more
    than their own norm, seen with 0.23.0. Model runner V1 puts the older ones first.

    Args:
        state: the pending state of the step, which on model runner V2 keeps the attention metadata.
        chunks: the step's batch, in order.

    Raises:
        CaptureError: a sequence's earlier part was left out, or given to one that has none.
    """
    metadata = getattr(state, "attn_metadata", None)
    for layer in metadata.values() if isinstance(metadata, dict) else ():
        context = getattr(getattr(layer, "prefill", None), "chunked_context", None)
        tokens = getattr(context, "prefill_tokens_with_context", None)
        if tokens is None:
            continue
        begin = 0
        for chunk in chunks[layer.num_decodes :]:
            if (chunk.start > 0) != (begin < tokens):
                raise CaptureError(
                    f"expected {chunk.request_id} (tokens {chunk.start} to {chunk.start + chunk.rows}) to attend to "
                    f"{chunk.start} earlier tokens; this vLLM's MLA on model runner V2 mistakes which prompts of a step have "
                    "some. Set VLLM_USE_V2_MODEL_RUNNER=0 and build a new generator."
                )
            begin += chunk.rows


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
