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

from spec_vllm_compat.errors import CompatError

FORMATS = """Prepared data, one sample a line (JSONL), row (Parquet) or example (datasets on disk):
{"input_ids": [1, 15, 7], "loss_mask": [0, 0, 1]} (no loss_mask: every token counts), or a conversation:
{"messages": [{"role": "user", "content": "..."}, ...]} or {"conversations": [{"from": "human", "value": "..."}, ...]},
which speculators' own preprocessing tokenizes with the model's chat template."""


Tokens = tuple["array[int]", bytes]
Talk = list[dict[str, Any]]
Parsed = Tokens | Talk | str
Tokenize = Callable[[list[Talk]], list[Tokens | str]]


@dataclass(frozen=True)
class Sample:
    """One sample, cut to the length asked for. ``number`` is the N of ``data_N.pt``, whatever other lines hold."""

    number: int
    line: int
    input_ids: array[int]
    loss_mask: bytes


@dataclass(frozen=True)
class BadLine:
    number: int
    line: int
    reason: str


@dataclass(frozen=True)
class Prepared:
    """What was read: samples by number, lines that are none, and how many were cut."""

    samples: list[Sample]
    bad: list[BadLine]
    cut: int

    @property
    def fingerprint(self) -> str:
        """Hash over numbers, tokens and masks: the same data give the same samples."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.number.to_bytes(8, "little"))
            digest.update(sample.input_ids.tobytes())
            digest.update(sample.loss_mask)
        return digest.hexdigest()


def read(
    path: Path,
    *,
    max_length: int,
    vocab_size: int,
    max_samples: int | None = None,
    seed: int | None = None,
    tokenize: Tokenize,
) -> Prepared:
    """Read prepared data.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or a folder written by ``datasets.Dataset.save_to_disk``.
        max_length: longer samples are cut.
        vocab_size: number of token ids of the model.
        max_samples: take so many, or all.
        seed: shuffle before taking and numbering; None keeps the order of the file.
        tokenize: turns conversations into (input_ids, loss_mask), None for one that cannot be used.

    Raises:
        CompatError: there is no such file, its kind is unknown, or it mixes tokens and conversations.
    """
    rows = list(_parsed(path))
    if seed is not None:
        random.Random(seed).shuffle(rows)
    if max_samples is not None:
        rows = rows[:max_samples]
    if not rows:
        raise CompatError(f"{path}: expected at least one sample; found none. {FORMATS}")
    bad = [BadLine(number, line, value) for number, (line, value) in enumerate(rows) if isinstance(value, str)]
    tokens: list[tuple[int, int, Tokens | str]] = [
        (number, line, value) for number, (line, value) in enumerate(rows) if isinstance(value, tuple)
    ]
    talks = [(number, line, value) for number, (line, value) in enumerate(rows) if isinstance(value, list)]
    if talks and tokens:
        raise CompatError(f"{path}: line {talks[0][1]} is a conversation, other lines are tokens; expected one kind")
    if talks:
        tokenized = tokenize([value for _, _, value in talks])
        tokens = [(number, line, value) for (number, line, _), value in zip(talks, tokenized, strict=True)]
    samples, cut = [], 0
    for number, line, found in tokens:
        reason = found if isinstance(found, str) else _wrong_tokens(*found, vocab_size)
        if isinstance(found, str) or reason:
            bad.append(BadLine(number, line, str(reason)))
            continue
        ids, mask = found
        cut += len(ids) > max_length
        samples.append(Sample(number, line, ids[:max_length], mask[:max_length]))
    return Prepared(samples, sorted(bad, key=lambda wrong: wrong.line), cut)


def _parsed(path: Path) -> Iterator[tuple[int, Parsed]]:
    """(line, tokens and mask | conversation | what is wrong with it); lines count from 1."""
    for line, row in _rows(path):
        yield line, row if isinstance(row, str) else _parse(row)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.is_dir():
        dataset = datasets_package().load_from_disk(str(path))
        if not hasattr(dataset, "column_names") or isinstance(dataset, dict):
            raise CompatError(f"{path}: expected one dataset; found splits {sorted(dataset)}. Name one split's folder.")
        yield from enumerate(dataset.with_format(None), 1)
    elif not path.exists():
        raise CompatError(f"{path}: expected prepared data; found no such file. {FORMATS}")
    elif path.suffix == ".parquet":
        yield from enumerate(datasets_package().Dataset.from_parquet(str(path)), 1)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    yield line, json.loads(text)
                except ValueError as error:
                    yield line, f"not JSON: {error}"
    else:
        raise CompatError(f"{path}: expected .jsonl, .parquet or a folder; found {path.suffix or path.name}. {FORMATS}")


def datasets_package() -> Any:
    try:
        import datasets
    except ImportError:
        raise CompatError(
            "Parquet and datasets on disk are read with `datasets`: pip install 'spec-vllm-compat[datasets]'"
        ) from None
    return datasets


def _parse(row: Any) -> Parsed:  # noqa: PLR0911
    if not isinstance(row, dict):
        return f"expected an object; found {type(row).__name__}"
    if "input_ids" in row:
        ids = row["input_ids"]
        mask = row.get("loss_mask")
        if not isinstance(ids, list) or not isinstance(mask, list | None):
            return "input_ids or loss_mask is not a list"
        return _compact(ids, mask)
    talk = row.get("messages") or row.get("conversations")
    if talk is None:
        return f"expected input_ids, messages or conversations; found {sorted(row)}"
    if not isinstance(talk, list) or not all(isinstance(turn, dict) for turn in talk):
        return "the conversation is not a list of turns"
    # One shape for all: Arrow fills a key that only some turns have with None, which speculators takes for a role.
    turns = [
        {
            "from": turn.get("from", turn.get("role")),
            "value": turn.get("value", turn.get("content")) or "",
            "thinking": turn.get("thinking"),
        }
        for turn in talk
    ]
    if not all(isinstance(turn["from"], str) and isinstance(turn["value"], str) for turn in turns):
        return "a turn has no role or no text"
    return turns


def _compact(ids: list[Any], mask: list[Any] | None) -> Tokens | str:
    try:
        tokens = array("i", ids)  # 4 bytes a token; a list takes 36
    except (TypeError, OverflowError):
        return "input_ids holds something that is no token id"
    try:
        return tokens, b"\1" * len(ids) if mask is None else bytes(mask)
    except (TypeError, ValueError):
        return "loss_mask holds something other than 0 and 1"


def _wrong_tokens(ids: array[int], mask: bytes, vocab_size: int) -> str | None:
    if not ids:
        return "input_ids is empty"
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        return f"token id {low if low < 0 else high} is outside the model's vocabulary [0, {vocab_size})"
    if len(mask) != len(ids):
        return f"loss_mask of {len(mask)} for {len(ids)} tokens"
    if any(value not in (0, 1) for value in mask):
        return "loss_mask holds something other than 0 and 1"
    return None


def tokenizer_of(model_path: str, max_length: int) -> Tokenize:
    """Tokenizes conversations with speculators' own preprocessing, which drops some without saying which."""

    def tokenize(talks: list[Talk]) -> list[Tokens | str]:
        from datasets import Dataset
        from speculators.data_generation.preprocessing import build_eagle3_dataset
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=True)
        if getattr(tokenizer, "chat_template", None) is None:
            raise CompatError(f"{model_path}: the tokenizer has no chat template. Pass tokens instead.")

        def build(part: list[Talk]) -> list[Tokens | str]:
            dataset = Dataset.from_dict({"conversations": part})
            built = build_eagle3_dataset(dataset, tokenizer, max_length=max_length, num_proc=None).with_format(None)
            if len(built) == len(part):
                return [_compact(row["input_ids"], row["loss_mask"]) for row in built]
            if len(part) == 1:
                return ["speculators' preprocessing cannot use this conversation"]
            middle = len(part) // 2  # find the dropped ones
            return build(part[:middle]) + build(part[middle:])

        return build(talks)

    return tokenize
