"""The prepared data: tokens and loss masks, checked line by line before anything expensive starts."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_vllm_compat.cli.progress import counted
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.remote_code import trusted

FORMATS = """Prepared data, one sample a line (JSONL), row (Parquet) or example (datasets on disk):
{"input_ids": [1, 15, 7], "loss_mask": [0, 0, 1]} (no loss_mask: every token counts), or a conversation:
{"messages": [{"role": "user", "content": "..."}, ...]} or {"conversations": [{"from": "human", "value": "..."}, ...]},
which speculators' own preprocessing tokenizes with the model's chat template."""

Tokens = tuple["array[int]", bytes]
Talk = list[dict[str, Any]]
#: Turns conversations into rows with ``input_ids`` and ``loss_mask``, or into a sentence for one that cannot be used.
Tokenize = Callable[[list[Talk]], list[dict[str, Any] | str]]


@dataclass(frozen=True)
class Sample:
    """One sample, cut to the length asked for. ``number`` is the N of ``data_N.pt``, whatever other lines hold."""

    number: int
    line: int
    input_ids: array[int]
    loss_mask: bytes


@dataclass(frozen=True)
class Prepared:
    """What was read: samples by number, lines that are none (line, number, reason), and how many were cut."""

    samples: list[Sample]
    bad: list[tuple[int, int, str]]
    cut: int

    @property
    def fingerprint(self) -> str:
        """Hash over numbers, tokens and masks: the same data give the same samples."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.number.to_bytes(8, "little") + sample.input_ids.tobytes() + sample.loss_mask)
        return digest.hexdigest()


def read(
    path: Path, *, max_length: int, vocab_size: int, tokenize: Tokenize, max_samples: int | None = None,
    seed: int | None = None,
) -> Prepared:  # fmt: skip
    """Read a ``.jsonl`` or ``.parquet`` file, or a folder written by ``datasets.Dataset.save_to_disk``.

    Samples longer than ``max_length`` are cut. With ``seed`` they are shuffled before ``max_samples`` are taken and numbered.
    Raises CompatError where there is no such file, its kind is unknown, or it mixes tokens and conversations.
    """
    lines = [(line, row if isinstance(row, str) else _parse(row, vocab_size)) for line, row in _rows(path)]
    if seed is not None:
        random.Random(seed).shuffle(lines)
    lines = lines[:max_samples]
    if not lines:
        raise CompatError(f"{path}: expected at least one sample; found none. {FORMATS}")
    talks = [(line, found) for line, found in lines if isinstance(found, list)]
    if talks and any(isinstance(found, tuple) for _, found in lines):
        raise CompatError(f"{path}: line {talks[0][0]} is a conversation, other lines are tokens; expected one kind")
    tokenized = iter(tokenize([talk for _, talk in talks])) if talks else iter(())
    samples, bad, cut = [], [], 0
    for number, (line, found) in enumerate(lines):
        if isinstance(found, list):
            row = next(tokenized)
            found = row if isinstance(row, str) else _parse(row, vocab_size)  # noqa: PLW2901
        if isinstance(found, tuple):
            ids, mask = found
            cut += len(ids) > max_length
            samples.append(Sample(number, line, ids[:max_length], mask[:max_length]))
        else:
            bad.append((line, number, str(found)))
    return Prepared(samples, sorted(bad), cut)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, row, or what is wrong with the line); lines count from 1."""
    if path.is_dir():
        from datasets import load_from_disk

        dataset = load_from_disk(str(path))
        if isinstance(dataset, dict):
            raise CompatError(f"{path}: expected one dataset; found splits {sorted(dataset)}. Name one split's folder.")
        yield from enumerate(dataset.with_format(None), 1)
    elif not path.exists():
        raise CompatError(f"{path}: expected prepared data; found no such file. {FORMATS}")
    elif path.suffix == ".parquet":
        from datasets import Dataset

        yield from enumerate(Dataset.from_parquet(str(path)), 1)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                try:
                    if text.strip():
                        yield line, json.loads(text)
                except ValueError as error:
                    yield line, f"not JSON: {error}"
    else:
        raise CompatError(f"{path}: expected .jsonl, .parquet or a folder; found {path.suffix or path.name}. {FORMATS}")


def _parse(row: Any, vocab_size: int) -> Tokens | Talk | str:
    """Tokens and mask, a conversation, or what is wrong."""
    if not isinstance(row, dict):
        return f"expected an object; found {type(row).__name__}"
    if "input_ids" in row:
        return _tokens(row["input_ids"], row.get("loss_mask"), vocab_size)
    talk = row.get("messages") or row.get("conversations")
    if talk is None:
        return f"expected input_ids, messages or conversations; found {sorted(row)}"
    if not isinstance(talk, list) or not all(isinstance(turn, dict) for turn in talk):
        return "the conversation is not a list of turns"
    # One shape for all: Arrow fills a key that only some turns have with None, which speculators takes for a role.
    names = {"from": "role", "value": "content", "thinking": "thinking"}
    turns = [{name: turn.get(name, turn.get(other)) for name, other in names.items()} for turn in talk]
    turns = [{**turn, "value": turn["value"] or ""} for turn in turns]
    if not all(isinstance(turn["from"], str) and isinstance(turn["value"], str) for turn in turns):
        return "a turn has no role or no text"
    return turns


def _tokens(ids: Any, mask: Any, vocab_size: int) -> Tokens | str:
    if not isinstance(ids, list) or not isinstance(mask, list | None):
        return "input_ids or loss_mask is not a list"
    if not ids:
        return "input_ids is empty"
    if mask is not None and len(mask) != len(ids):
        return f"loss_mask of {len(mask)} for {counted(len(ids), 'token')}"
    try:
        tokens = array("i", ids)  # 4 bytes a token; a list takes 36
    except (TypeError, OverflowError):
        return "input_ids holds something that is no token id"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        return f"token id {wrong} is outside the model's vocabulary [0, {vocab_size})"
    try:
        marks = b"\1" * len(ids) if mask is None else bytes(mask)
    except (TypeError, ValueError):
        marks = b"\2"
    return (tokens, marks) if max(marks) <= 1 else "loss_mask holds something other than 0 and 1"


def tokenizer_of(model_path: str, max_length: int) -> Tokenize:
    """Tokenizes conversations with speculators' own preprocessing, which drops some without saying which."""

    def tokenize(talks: list[Talk]) -> list[dict[str, Any] | str]:
        from datasets import Dataset
        from speculators.data_generation.preprocessing import build_eagle3_dataset
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trusted())
        if getattr(tokenizer, "chat_template", None) is None:
            raise CompatError(f"{model_path}: the tokenizer has no chat template. Pass tokens instead.")

        def build(part: list[Talk]) -> list[dict[str, Any] | str]:
            dataset = Dataset.from_dict({"conversations": part})
            built = build_eagle3_dataset(dataset, tokenizer, max_length=max_length, num_proc=None).with_format(None)
            if len(built) == len(part):
                return list(built)
            if len(part) == 1:
                return ["speculators' preprocessing cannot use this conversation"]
            middle = len(part) // 2  # find the dropped ones
            return build(part[:middle]) + build(part[middle:])

        return build(talks)

    return tokenize
