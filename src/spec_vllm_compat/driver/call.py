"""One call of ``generate()``: which rows are due, which have come, and the proof that they are the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spec_vllm_compat.errors import ExtractionError, InvalidBatchError
from spec_vllm_compat.protocol import Step


class Call:
    """Rows of one ``generate()`` call, written to their place as the steps come in.

    Args:
        prompts: token ids of each sequence, already cut to the length that the model allows.
        layer_ids: ascending ids of the captured decoder layers.
        hidden_size: width that the model's configuration gives.
        dtype: dtype that the model's configuration gives.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], layer_ids: Sequence[int], hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.prompts = prompts
        self.layer_ids = tuple(layer_ids)
        self._hidden_size, self._dtype = hidden_size, dtype
        self._offsets = [0]
        for prompt in prompts:
            self._offsets.append(self._offsets[-1] + len(prompt))
        self._position: dict[str, int] = {}
        self._filled = [0] * len(prompts)
        shape = (len(self.layer_ids), self._offsets[-1])
        self._rows = torch.empty((*shape, hidden_size), dtype=dtype)
        self._peaks = torch.zeros(shape, dtype=torch.float32)

    def register(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Bind a request to the next sequence of the batch: the generator adds requests in the order of the batch."""
        position = len(self._position)
        if position >= len(self.prompts) or list(token_ids) != list(self.prompts[position]):
            raise ExtractionError(f"request {request_id}: its tokens are not those of sequence {position} of the batch")
        self._position[request_id] = position

    def write(self, step: Step) -> None:
        """Put the rows of one step where they belong.

        Raises:
            ExtractionError: a row belongs to no request, leaves a hole, was computed from another token or position,
                is NaN or infinite, or has another width or dtype than the model.
        """
        tokens = sum(chunk.rows for chunk in step.chunks)
        if not tokens:
            return
        dtype = getattr(torch, step.dtype)
        if dtype is not self._dtype:
            raise ExtractionError(f"expected rows of {self._dtype}, the model's dtype; found {dtype}")
        rows = torch.from_numpy(step.rows).view(dtype)
        if rows.shape != (len(self.layer_ids), tokens, self._hidden_size):
            raise ExtractionError(
                f"expected rows of shape {(len(self.layer_ids), tokens, self._hidden_size)}; found {tuple(rows.shape)}"
            )
        peaks = torch.from_numpy(step.peaks)
        begin = 0
        for chunk in step.chunks:
            end = begin + chunk.rows
            position = self._position.get(chunk.request_id)
            if position is None:
                raise ExtractionError(f"request {chunk.request_id}: the model ran it, but this call did not ask for it")
            if chunk.start > self._filled[position] or chunk.start + chunk.rows > len(self.prompts[position]):
                raise ExtractionError(
                    f"request {chunk.request_id}: expected rows from {self._filled[position]} of "
                    f"{len(self.prompts[position])}; found rows {chunk.start} to {chunk.start + chunk.rows}"
                )
            self._check_inputs(step, chunk, position, begin, end)
            self._check_finite(chunk.request_id, chunk.start, peaks[:, begin:end])
            at = self._offsets[position] + chunk.start
            self._rows[:, at : at + chunk.rows] = rows[:, begin:end]
            self._peaks[:, at : at + chunk.rows] = peaks[:, begin:end]
            # A preempted request starts again at 0 and overwrites its own rows.
            self._filled[position] = chunk.start + chunk.rows
            begin = end

    def _check_inputs(self, step: Step, chunk: Any, position: int, begin: int, end: int) -> None:
        if step.token_ids is not None:
            due = self.prompts[position][chunk.start : chunk.start + chunk.rows]
            if step.token_ids[begin:end].tolist() != list(due):
                raise ExtractionError(
                    f"request {chunk.request_id}: rows {chunk.start} to {chunk.start + chunk.rows} were computed from "
                    "other tokens than the prompt's: batch order and attribution disagree"
                )
        if step.positions is not None:
            found = step.positions[begin:end]
            if int(found[0]) != chunk.start or int(found[-1]) != chunk.start + chunk.rows - 1:
                raise ExtractionError(
                    f"request {chunk.request_id}: expected positions {chunk.start} to {chunk.start + chunk.rows - 1}; "
                    f"found {int(found[0])} to {int(found[-1])}"
                )

    def _check_finite(self, request_id: str, start: int, peaks: torch.Tensor) -> None:
        bad = ~torch.isfinite(peaks)
        if bad.any():
            layer, row = (int(index) for index in bad.nonzero()[0])
            raise ExtractionError(
                f"request {request_id}: layer {self.layer_ids[layer]}, row {start + row} holds NaN or infinite values"
            )

    def complete(self) -> None:
        """Raise :class:`ExtractionError` unless every row of every request has come."""
        for request_id, position in self._position.items():
            if self._filled[position] != len(self.prompts[position]):
                raise ExtractionError(
                    f"request {request_id}: expected {len(self.prompts[position])} rows; found {self._filled[position]}"
                )
        if len(self._position) != len(self.prompts):
            raise ExtractionError(f"{len(self.prompts)} sequences, but {len(self._position)} requests")

    def layers(self, asked: Sequence[int]) -> list[torch.Tensor]:
        """One tensor ``[total_tokens, hidden_size]`` for each layer asked for, in that order, sequences in batch order."""
        return [self._rows[self.layer_ids.index(layer)] for layer in asked]

    def by_request(self, asked: Sequence[int]) -> dict[str, list[torch.Tensor]]:
        """Request id to one tensor ``[prompt_length, hidden_size]`` for each layer asked for, in that order."""
        layers = self.layers(asked)
        return {
            request_id: [rows[self._offsets[position] : self._offsets[position + 1]] for rows in layers]
            for request_id, position in self._position.items()
        }

    def check(self, results: Sequence[dict[str, Any]], asked: Sequence[int]) -> None:
        """Compare what ``generate()`` is about to return with what was captured.

        The first and the last row of every tensor must have the magnitude that was computed beside the model: rows of
        another layer, another request or another position do not.
        """
        if len(results) != len(self.prompts):
            raise ExtractionError(f"{len(results)} results for {len(self.prompts)} sequences")
        for position, (result, prompt) in enumerate(zip(results, self.prompts, strict=True)):
            name = f"sequence {position}"
            if result["input_ids"].tolist() != list(prompt):
                raise ExtractionError(f"{name}: its result carries the input_ids of another sequence")
            states = result["hidden_states"]
            if len(states) != len(asked):
                raise ExtractionError(f"{name}: {len(asked)} layers asked for, {len(states)} returned")
            first, last = self._offsets[position], self._offsets[position + 1] - 1
            for layer, rows in zip(asked, states, strict=True):
                if tuple(rows.shape) != (len(prompt), self._hidden_size) or rows.dtype is not self._dtype:
                    raise ExtractionError(
                        f"{name}, layer {layer}: expected {len(prompt)} rows of {self._hidden_size} {self._dtype} "
                        f"values; found {tuple(rows.shape)} {rows.dtype}"
                    )
                peaks = self._peaks[self.layer_ids.index(layer)]
                ends = rows[:: max(1, len(prompt) - 1)][[0, -1]].float().abs().amax(dim=-1)
                if ends.tolist() != [float(peaks[first]), float(peaks[last])]:
                    raise ExtractionError(
                        f"{name}, layer {layer}: first or last row is not the one that the model computed"
                    )
                if not peaks[first : last + 1].any():
                    raise ExtractionError(f"{name}, layer {layer}: every value is zero")


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
    prompts: list[list[int]] = []
    for position, row in enumerate(token_ids):
        ids = row.tolist() if hasattr(row, "tolist") else list(row)
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
