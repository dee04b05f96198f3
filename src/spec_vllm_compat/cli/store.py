"""Samples on disk, in the form that speculators' trainer reads. A file is there whole or not at all.

::

    DIR/rows_0-2000/data_0.pt ...      one sample: input_ids, hidden_states, loss_mask
    DIR/data_config.json               written by speculators' own DataGenerationConfig
    DIR/sample_lengths.json            speculators 0.4: sample number to length; linked into every rows_A-B
    DIR/manifest.json                  ours: what was asked, with what, what came of it (one a shard)

The trainer takes every file below DIR whose name ends in ``pt`` for a sample, so no other name may.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_vllm_compat.cli.progress import counted
from spec_vllm_compat.errors import CompatError

_NAME = re.compile(r"^data_(\d+)\.pt$")
Problem = tuple[str, str]  # kind and sentence


def sample_path(root: Path, shard_size: int, number: int) -> Path:
    """``rows_A-B/data_N.pt`` with A <= N < B, or flat when ``shard_size`` is 0."""
    if not shard_size:
        return root / f"data_{number}.pt"
    first = number - number % shard_size
    return root / f"rows_{first}-{first + shard_size}" / f"data_{number}.pt"


def newer_samples(root: Path) -> dict[int, Path]:
    """The samples of a folder in the format of speculators 0.5 and newer, which ``convert`` writes."""
    return {int(path.stem[3:]): path for path in (root / "hidden_states").glob("hs_*.safetensors")}


def find_samples(root: Path) -> tuple[dict[int, list[Path]], list[Path]]:
    """Sample number to files of that number, and the other files that the trainer would take for samples."""
    samples: dict[int, list[Path]] = {}
    strays = []
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            if match := _NAME.match(name):
                samples.setdefault(int(match[1]), []).append(Path(folder, name))
            elif name.endswith("pt"):
                strays.append(Path(folder, name))
    return dict(sorted(samples.items())), strays


def part_of(path: Path) -> Path:
    """Where a file is written before it is whole."""
    return path.with_name(f".{path.name}.part")


def publish(path: Path, write: Callable[[Path], Any]) -> int:
    """Write a file so that a kill or a power cut at any moment leaves the old state or the new one. Returns bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _replace(path, part_of(path), write)


def _replace(path: Path, part: Path, write: Callable[[Path], Any]) -> int:
    try:
        write(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def write_sample(path: Path, sample: dict[Any, Any]) -> int:
    """Write a sample for ``torch.load``; returns bytes."""
    import torch

    return publish(path, lambda part: torch.save(sample, part))


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1) + "\n"
    part = part_of(path).with_suffix(f".{os.getpid()}")  # shards side by side write some files at the same time
    _replace(path, part, lambda part: part.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The value, or None when there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CompatError(f"{path}: expected JSON; found {error}. Move the file away and start again.") from None


def link_lengths(root: Path, folder: Path) -> None:
    """The trainer of speculators 0.4 looks for ``sample_lengths.json`` beside the sample that it happens to list first."""
    folder.mkdir(exist_ok=True)
    if folder != root:
        try:
            (folder / "sample_lengths.json").symlink_to("../sample_lengths.json")
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            shutil.copy(root / "sample_lengths.json", folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock for the block, or raise CompatError. It ends with the process, however that ends."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise CompatError(
            f"another extract is writing this part of {path.parent}. Wait for it, or give each a --shard-index."
        ) from None


def check_sample(
    path: Path,
    *,
    values: bool = False,
    input_ids: Sequence[int] | None = None,
    loss_mask: Sequence[int] | None = None,
    layers: int | None = None,
    hidden_size: int | None = None,
    dtype: str | None = None,
) -> tuple[list[Problem], dict[str, Any] | None]:
    """What is wrong with one file, and the sample if it is one. What is None is not known; ``values`` reads the rows."""
    import torch

    try:
        sample = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - torch raises many types for a damaged file
        return [("unreadable", f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0]:.80})")], None
    problem = _format(sample)
    if problem:
        return [("format", problem)], None
    ids, mask, states = sample["input_ids"], sample["loss_mask"], sample["hidden_states"]
    rows, widths = ({state.shape[axis] for state in states} for axis in (0, 1))
    dtypes = {str(state.dtype).removeprefix("torch.") for state in states}
    checks = (
        ("mask", len(mask) != len(ids), f"loss_mask of {len(mask)} for {counted(len(ids), 'token')}"),
        ("mask", len(mask) == len(ids) and loss_mask is not None and mask.tolist() != list(loss_mask),
         "loss_mask is not that of the prepared data"),
        ("ids", input_ids is not None and ids.tolist() != list(input_ids),
         "input_ids are not those of the prepared data"),
        ("layers", layers not in (None, len(states)), f"{counted(len(states), 'layer')}, {layers} asked for"),
        ("rows", rows != {len(ids)}, f"{counted(min(rows), 'row')} for {counted(len(ids), 'token')}"),
        ("width", len(widths) > 1 or widths != {hidden_size or min(widths)},
         f"rows of width {sorted(widths)}, expected {hidden_size or 'one width'}"),
        ("dtype", len(dtypes) > 1 or dtypes != {dtype or min(dtypes)},
         f"rows of {sorted(dtypes)}, expected {dtype or 'one dtype'}"),
    )  # fmt: skip
    problems = [(kind, text) for kind, wrong, text in checks if wrong]
    return problems + (_values(states) if values else []), sample


def sound_sample(path: Path, **expected: Any) -> dict[str, Any]:
    """The sample, or CompatError with the first thing that :func:`check_sample` finds wrong."""
    problems, sample = check_sample(path, **expected)
    if problems or sample is None:
        raise CompatError(f"{path}: {problems[0][1]}. `spec-vllm-compat verify` on the folder says more.")
    return sample


def _format(sample: Any) -> str | None:
    import torch

    def integers(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_floating_point()

    if not isinstance(sample, dict) or not {"input_ids", "hidden_states", "loss_mask"} <= set(sample):
        keys = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
        return f"expected input_ids, hidden_states, loss_mask; found {keys}"
    if not integers(sample["input_ids"]) or not len(sample["input_ids"]):
        return "input_ids is not a 1-dimensional integer tensor with at least one token"
    states = sample["hidden_states"]
    tensors = isinstance(states, list) and all(isinstance(rows, torch.Tensor) and rows.dim() == 2 for rows in states)
    if not tensors or not states:
        return "hidden_states is not a list of 2-dimensional tensors"
    if not integers(sample["loss_mask"]):
        return f"loss_mask is {type(sample['loss_mask']).__name__}, not a 1-dimensional integer tensor"
    return None


def _values(states: list[Any]) -> list[Problem]:
    import torch

    for index, rows in enumerate(states):
        peaks = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1) if rows.numel() else rows.new_ones(0)
        for kind, bad, text in (
            ("finite", ~torch.isfinite(peaks), " holds NaN or infinite values"),
            ("zero", peaks == 0, ": every value is zero"),
        ):
            if bad.any():
                return [(kind, f"tensor {index}, row {int(bad.nonzero()[0])}{text}")]
    return []
