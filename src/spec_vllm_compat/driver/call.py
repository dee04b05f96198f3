"""One call of ``generate()``: which rows are due, which have come, and the proof that they are the right ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from spec_vllm_compat.driver import nonfinite
from spec_vllm_compat.driver.buffers import BufferPool
from spec_vllm_compat.errors import ExtractionError, InvalidBatchError
from spec_vllm_compat.protocol import Chunk, Layout, Segment, Step

logger = logging.getLogger("spec_vllm_compat")


class Call:
    """Rows of one ``generate()`` call. Workers on this host write them to their place; others send them.

    Args:
        prompts: token ids of each sequence, already cut to the length that the model allows.
        layer_ids: ascending ids of the captured decoder layers.
        hidden_size: width that the model's configuration gives.
        dtype: dtype that the model's configuration gives.
        pool: where the memory comes from.
        shared: whether a worker can map it.

    Attributes:
        positions: request id to the position of its sequence in the batch.
        before: for each sequence, the tokens of all sequences before it; then the tokens of the whole batch.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        pool: BufferPool,
        shared: bool,
    ) -> None:
        self.prompts = prompts
        self.layer_ids = tuple(layer_ids)
        self._dtype = dtype
        self._nonfinite_allowed = nonfinite.allowed()
        self.before = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]).tolist()
        self.positions: dict[str, int] = {}
        self._filled = [0] * len(prompts)
        self._inputs_seen = [True, True]  # token ids and positions came with every step
        self._given = False
        name = str(dtype).removeprefix("torch.")
        sizes = (self.before[-1], len(self.layer_ids), hidden_size, name, dtype.itemsize)
        buffer, self._bytes = pool.take(Layout(None, {}, *sizes).size)
        self.segment: Segment | None = buffer.segment if shared else None
        self._layout = Layout(self.segment, {}, *sizes)

    def register(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Bind a request to the next sequence of the batch: the generator adds requests in the order of the batch."""
        position = len(self.positions)
        if position >= len(self.prompts) or list(token_ids) != list(self.prompts[position]):
            raise ExtractionError(f"request {request_id}: its tokens are not those of sequence {position} of the batch")
        self.positions[request_id] = position
        self._layout.requests[request_id] = (self.before[position], len(token_ids))

    def without_segment(self) -> None:
        """Rows will come in the replies."""
        self._layout = replace(self._layout, segment=None)

    def layout(self) -> Layout | None:
        """The layout, once: workers keep it for the rest of the call."""
        given, self._given = self._given, True
        return None if given else self._layout

    def take_in(self, step: Step) -> None:
        """Account for the rows of one step, and write them if they came in the reply.

        Raises:
            ExtractionError: a row belongs to no request, or leaves a hole.
        """
        if not step.chunks:
            return
        self._inputs_seen = [self._inputs_seen[0] and step.token_ids, self._inputs_seen[1] and step.positions]
        begin = 0
        for chunk in step.chunks:
            position = self.positions.get(chunk.request_id)
            if position is None:
                raise ExtractionError(f"request {chunk.request_id}: the model ran it, but this call did not ask for it")
            end = chunk.start + chunk.rows
            if chunk.start > self._filled[position] or end > len(self.prompts[position]):
                raise ExtractionError(
                    f"request {chunk.request_id}: expected rows from {self._filled[position]} of "
                    f"{len(self.prompts[position])}; found rows {chunk.start} to {end}"
                )
            if step.inline is not None:
                self._write(step.inline, chunk, position, begin)
            self._filled[position] = end  # a preempted request starts again at 0 and overwrites its own rows
            begin += chunk.rows

    def _write(self, inline: Any, chunk: Chunk, position: int, begin: int) -> None:
        here, at = slice(begin, begin + chunk.rows), self.before[position] + chunk.start
        for layer in range(len(self.layer_ids)):
            offset = self._layout.rows_at(self.before[position], len(self.prompts[position]), layer, chunk.start)
            rows = np.ascontiguousarray(inline.rows[layer, here]).reshape(-1)
            self._bytes[offset : offset + rows.size] = rows
        self._peaks()[:, at : at + chunk.rows] = inline.peaks[:, here]
        for name, values in (("token_ids", inline.token_ids), ("positions", inline.positions)):
            if values is not None:
                self._inputs(name)[at : at + chunk.rows] = values[here]

    def _peaks(self) -> Any:
        offset, count = self._layout.peaks_at, self._layout.layers * self._layout.tokens
        return self._bytes[offset : offset + 4 * count].view(np.float32).reshape(self._layout.layers, -1)

    def _inputs(self, name: str) -> Any:
        offset = getattr(self._layout, f"{name}_at")
        return self._bytes[offset : offset + 8 * self._layout.tokens].view(np.int64)

    def complete(self) -> None:
        """Prove that every row has come and is the one that was asked for.

        Raises:
            ExtractionError: rows of a request are missing, were computed from another token or at another position than
                its prompt's, are NaN or infinite, or are all zero.
        """
        if len(self.positions) != len(self.prompts):
            raise ExtractionError(f"{len(self.prompts)} sequences, but {len(self.positions)} requests")
        for request_id, position in self.positions.items():
            if self._filled[position] != len(self.prompts[position]):
                raise ExtractionError(
                    f"request {request_id}: expected {len(self.prompts[position])} rows; found {self._filled[position]}"
                )
        token_ids_seen, positions_seen = self._inputs_seen
        if token_ids_seen:
            due = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in self.prompts])
            self._compare("token", self._inputs("token_ids"), due)
        if positions_seen:
            self._compare(
                "position", self._inputs("positions"), np.concatenate([np.arange(len(p)) for p in self.prompts])
            )
        peaks = self._peaks()
        finite = np.isfinite(peaks)
        if not finite.all():
            layer, at = (int(index) for index in np.argwhere(~finite)[0])
            request_id, row = self._owner(at)
            text = f"request {request_id}: layer {self.layer_ids[layer]}, row {row} holds NaN or infinite values"
            if not self._nonfinite_allowed:
                raise ExtractionError(f"{text}. {nonfinite.ADVICE}")
            logger.warning("%s; %d of %d rows of this call do", text, int((~finite).sum()), finite.size)
        zero = np.argwhere(np.maximum.reduceat(peaks, self.before[:-1], axis=1) == 0)
        if len(zero):
            layer, position = (int(index) for index in zero[0])
            raise ExtractionError(
                f"request {self._owner(self.before[position])[0]}: layer {self.layer_ids[layer]} is zero in every row. "
                "Is it padding alone? Leave the sequence out."
            )

    def _compare(self, what: str, found: Any, due: Any) -> None:
        wrong = np.flatnonzero(found != due)
        if len(wrong):
            at = int(wrong[0])
            request_id, row = self._owner(at)
            raise ExtractionError(
                f"request {request_id}: row {row} was computed from {what} {found[at]}; the prompt has {due[at]} there: "
                "batch order and attribution disagree"
            )

    def _owner(self, at: int) -> tuple[str, int]:
        """Request id and row of the ``at``-th token of the call."""
        position = int(np.searchsorted(self.before, at, side="right")) - 1
        request_id = next(key for key, value in self.positions.items() if value == position)
        return request_id, at - self.before[position]

    def rows(self, position: int, layer_id: int) -> torch.Tensor:
        """Rows ``[prompt_length, hidden_size]`` of one sequence and layer, as a tensor with a storage of its own."""
        length, layer = len(self.prompts[position]), self.layer_ids.index(layer_id)
        offset = self._layout.rows_at(self.before[position], length, layer)
        piece = self._bytes[offset : offset + length * self._layout.row_bytes]
        return torch.from_numpy(piece).view(self._dtype).view(length, -1)

    def check(self, results: Sequence[dict[str, Any]], asked: Sequence[int]) -> None:
        """Compare what ``generate()`` is about to return with what was captured.

        The first and the last row of every tensor must have the magnitude that was computed beside the model: rows of
        another layer, another request or another position do not.
        """
        if len(results) != len(self.prompts):
            raise ExtractionError(f"{len(results)} results for {len(self.prompts)} sequences")
        peaks = self._peaks()
        for position, (result, prompt) in enumerate(zip(results, self.prompts, strict=True)):
            name = f"sequence {position}"
            if result["input_ids"].tolist() != list(prompt):
                raise ExtractionError(f"{name}: its result carries the input_ids of another sequence")
            states = result["hidden_states"]
            if len(states) != len(asked):
                raise ExtractionError(f"{name}: {len(asked)} layers asked for, {len(states)} returned")
            first, last = self.before[position], self.before[position + 1] - 1
            for layer, rows in zip(asked, states, strict=True):
                if tuple(rows.shape) != (len(prompt), self._layout.hidden_size) or rows.dtype is not self._dtype:
                    raise ExtractionError(
                        f"{name}, layer {layer}: expected {len(prompt)} rows of {self._layout.hidden_size} {self._dtype} "
                        f"values; found {tuple(rows.shape)} {rows.dtype}"
                    )
                due = peaks[self.layer_ids.index(layer), [first, last]]
                found = [float(rows[0].abs().max()), float(rows[-1].abs().max())]
                if not np.array_equal(found, due, equal_nan=True):
                    raise ExtractionError(
                        f"{name}, layer {layer}: first or last row is not the one that the model computed"
                    )


class Handover:
    """Rows of one request and layer as speculators picks them up, ``.clone().cpu()``, without copying them.

    Their memory is not used for anything else while the tensor lives, so a copy would gain nothing.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def clone(self) -> Handover:
        return self

    def cpu(self) -> torch.Tensor:
        return self._rows


class LayerRows:
    """One layer of a whole call, from which speculators 0.3 slices request after request."""

    def __init__(self, call: Call, asked: Sequence[int], index: int) -> None:
        self._call, self._asked, self._index = call, asked, index

    def __getitem__(self, rows: slice) -> Handover:
        before = self._call.before
        position = int(np.searchsorted(before, rows.start))
        if before[position : position + 2] != [rows.start, rows.stop]:
            raise ExtractionError(f"rows {rows.start} to {rows.stop} are not those of one sequence")
        return _handover(self._call, position, self._asked, self._index)


def _handover(call: Call, position: int, asked: Sequence[int], index: int) -> Handover:
    rows = call.rows(position, asked[index])
    # A layer that was asked for twice is two tensors; writing into one must not change the other.
    return Handover(rows.clone() if asked[index] in asked[:index] else rows)


def states_by_layer(call: Call, asked: Sequence[int]) -> list[LayerRows]:
    """Captured states as speculators 0.3 takes them: one entry for each layer asked for, in that order."""
    return [LayerRows(call, asked, index) for index in range(len(asked))]


def states_by_request(call: Call, asked: Sequence[int]) -> dict[str, list[Handover]]:
    """Captured states as speculators 0.4 takes them: request id to its layers."""
    return {
        request_id: [_handover(call, position, asked, index) for index in range(len(asked))]
        for request_id, position in call.positions.items()
    }


def prompts_of(token_ids: Any, max_length: int, vocab_size: int) -> list[list[int]]:
    """The batch as lists, checked before any work is done; each sequence is cut to ``max_length`` as speculators does.

    Raises:
        InvalidBatchError: the batch or a sequence is empty, a token id is no integer or outside ``[0, vocab_size)``.
    """
    if isinstance(token_ids, torch.Tensor):
        if token_ids.dim() != 2 or token_ids.is_floating_point():
            raise InvalidBatchError(
                f"token_ids: expected an integer tensor [batch, tokens]; found {token_ids.dtype} {tuple(token_ids.shape)}"
            )
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Iterable):
        raise InvalidBatchError(f"token_ids: expected a list of lists of integers; found {token_ids!r:.80}")
    prompts: list[list[int]] = []
    for position, row in enumerate(token_ids):
        ids = row.tolist() if hasattr(row, "tolist") else row
        ids = list(ids) if isinstance(ids, Iterable) else [None]
        if not all(type(token) is int for token in ids):
            raise InvalidBatchError(f"token_ids[{position}]: expected a list of integers; found {row!r:.80}")
        ids = ids[:max_length]
        if not ids:
            raise InvalidBatchError(
                f"token_ids[{position}] is empty (after cutting to max_model_len - 1 = {max_length} tokens); leave it out"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidBatchError(
                f"token_ids[{position}][{ids.index(wrong)}] is {wrong}: outside the vocabulary [0, {vocab_size}). "
                "Is this the model's own tokenizer?"
            )
        prompts.append(ids)
    if not prompts:
        raise InvalidBatchError("token_ids is empty: expected at least one sequence")
    return prompts
