"""``verify``: checks a finished or half-finished output, whoever wrote it, and names the fault that it shows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat.cli.progress import Progress, human
from spec_vllm_compat.errors import CompatError

SHOWN = 5  # examples of one problem

HELP = """Check a directory of extracted samples; it may be half-finished, and speculators alone may have written it.

\b
Looked at: every file readable; tokens, loss mask, rows and layers fit each other; no NaN, no rows of zeros; no holes,
no two files of one sample; configuration and manifests consistent; nothing else that the trainer would read.
Damage with a known cause is named: rows lost at a scheduler step (speculators 0.3), results in the string order of
request ids (0.4), layers dropped.

\b
Only a comparison tells whether the numbers are right:
  --prepared-data FILE                      tokens and masks are those of the data, in their places
  --against transformers --model-path ...   recomputes the rows of some samples
"""


@dataclass
class Problem:
    """One thing that is wrong, with all samples that show it."""

    id: str
    text: str
    where: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """What one file holds, as far as later checks need it."""

    number: int
    path: Path
    problems: list[tuple[str, str]]
    tokens: int = 0
    mask: int = 0
    rows: int = 0
    layers: int = 0
    hidden_size: int = 0
    dtype: str = ""
    size: int = 0
    ids_hash: str = ""


@click.command("verify", help=HELP, short_help="Check extracted samples.")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Leave the values of the rows unread.")
@click.option("--prepared-data", type=click.Path(exists=True, path_type=Path), help="The data that DIR was made from.")
@click.option("--seed", type=int, help="The --seed of the extraction, with --prepared-data.")
@click.option("--against", type=click.Choice(["transformers"]), help="Recompute rows; needs --model-path.")
@click.option("--model-path", metavar="MODEL", help="Default: the one that DIR was made with.")
@click.option("--samples", default=8, show_default=True, type=click.IntRange(1), help="How many to recompute.")
@click.option("--tolerance", default=0.1, show_default=True, help="Relative error of a row that is always let pass.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    directory: Path,
    quick: bool,
    prepared_data: Path | None,
    seed: int | None,
    against: str | None,
    model_path: str | None,
    samples: int,
    tolerance: float,
    as_json: bool,
) -> int:
    check = Verification(directory)
    check.run(values=not quick)
    model_path = model_path or check.model_path
    if prepared_data is not None:
        check.against_data(prepared_data, model_path, seed)
    if against is not None:
        if model_path is None:
            raise click.UsageError("--against needs --model-path: DIR does not say which model it was made with")
        check.against_transformers(model_path, samples, tolerance)
    click.echo(json.dumps(check.result(), indent=1) if as_json else check.text())
    return 1 if check.problems else 0


class Verification:
    """The checks over one directory. :attr:`problems` is empty when nothing is wrong."""

    def __init__(self, root: Path) -> None:
        from spec_vllm_compat.cli.store import find_samples, read_json

        self.root = root
        self.problems: dict[str, Problem] = {}
        self.notes: list[str] = []
        self.found: dict[int, Summary] = {}
        self.config: Any = read_json(root / "data_config.json")
        self.manifests = {path.name: read_json(path) for path in sorted(root.glob("manifest*.json"))}
        self._files, self._strays = find_samples(root)
        self.layer_ids: list[int] | None = None
        self.num_samples: int | None = None
        self.model_path: str | None = None
        self._dtype: str | None = None
        self._read_beside()

    def problem(self, kind: str, text: str, *where: str) -> None:
        self.problems.setdefault(kind, Problem(kind, text)).where.extend(where)

    # -- what lies beside the samples ------------------------------------------------------------------------------

    def _read_beside(self) -> None:
        if self.config is None:
            self.problem("config", "data_config.json is missing: removed, or the extraction did not get that far")
        else:
            self.layer_ids = self.config["hidden_states"]["layer_ids"]
            self.num_samples = self.config["data"]["num_samples"]
            self.model_path = self.config["model"]["target_model_path"]
        first: Any = next(iter(self.manifests.values()), None)
        for name, manifest in self.manifests.items():
            if manifest["identity"] != first["identity"]:
                differing = [key for key, value in manifest["identity"].items() if value != first["identity"].get(key)]
                self.problem("manifest", f"manifests differ in {', '.join(differing)}", name)
        if first is not None:
            if self.layer_ids not in (None, first["identity"]["layer_ids"]):
                self.problem("config", f"data_config.json says layers {self.layer_ids}, the manifest "
                                       f"{first['identity']['layer_ids']}")  # fmt: skip
            self.layer_ids = first["identity"]["layer_ids"]
            self.num_samples = first["num_samples"]
            self.model_path = first["model"]
            self._dtype = first["identity"]["save_dtype"]
            shards = first["shard"][1]
            begun = [manifest["shard"] for manifest in self.manifests.values()]
            missing = [index for index in range(shards) if [index, shards] not in begun]
            if missing:
                self.problem("shards", f"of {shards} shards, these have not begun: {', '.join(map(str, missing))}")

    def _expected_numbers(self) -> list[int]:
        bad = {number for manifest in self.manifests.values() for number in manifest.get("skipped", [])}
        total = self.num_samples if self.num_samples is not None else max(self._files, default=-1) + 1
        return [number for number in range(total + len(bad)) if number not in bad]

    # -- the samples -----------------------------------------------------------------------------------------------

    def run(self, *, values: bool) -> None:
        """Read every file; ``values`` reads the rows too."""
        for path in self._strays:
            self.problem("stray", "the trainer takes these files for samples", str(path.relative_to(self.root)))
        for number, paths in self._files.items():
            if len(paths) > 1:
                names = " and ".join(str(path.relative_to(self.root)) for path in paths)
                self.problem("twice", "there are two files of one sample", f"data_{number} ({names})")
        progress = Progress(len(self._files), 0)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            jobs = ((number, paths[0], values) for number, paths in self._files.items())
            for summary in pool.map(lambda job: self._look(*job), jobs):
                self.found[summary.number] = summary
                progress.add(done=1, tokens=summary.tokens, size=summary.size)
                if progress.seconds > 5:
                    progress.show()
        self._judge()

    def _look(self, number: int, path: Path, values: bool) -> Summary:
        from spec_vllm_compat.cli.store import Expected, check_sample

        layers = len(self.layer_ids) if self.layer_ids is not None else None
        checked = check_sample(path, Expected(layers=layers, dtype=self._dtype), values=values)
        summary = Summary(number, path, checked.problems, size=path.stat().st_size)
        if checked.sample is not None:
            ids, mask, states = (checked.sample[key] for key in ("input_ids", "loss_mask", "hidden_states"))
            summary.tokens, summary.layers = len(ids), len(states)
            summary.mask = len(mask) if hasattr(mask, "__len__") else -1
            summary.rows, summary.hidden_size = states[0].shape
            summary.dtype = str(states[0].dtype).removeprefix("torch.")
            summary.ids_hash = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        return summary

    def _judge(self) -> None:
        texts = {
            "unreadable": "files are torn or damaged",
            "format": "files have another format than the trainer reads",
            "mask": "loss masks do not fit the tokens",
            "rows": "hidden states have another number of rows than tokens",
            "layers": "files hold another number of layers than the configuration says",
            "width": "rows have another width",
            "dtype": "rows have another dtype",
            "finite": "rows hold NaN or infinite values",
            "zero": "rows are all zero",
        }
        good = [summary for summary in self.found.values() if not summary.problems]
        for summary in self.found.values():
            for kind, text in summary.problems:
                self.problem(kind, texts[kind], f"data_{summary.number}: {text}")
        for what in ("layers", "hidden_size", "dtype"):
            values = {getattr(summary, what) for summary in good}
            if len(values) > 1:
                self.problem("mixed", f"files differ in {what}: {', '.join(map(str, sorted(values)))}")
        holes = [number for number in self._expected_numbers() if number not in self._files]
        if holes or not self._files:
            self.problem("holes", f"{len(holes)} samples are not there", *(f"data_{text}" for text in _ranges(holes)))
        for manifest in self.manifests.values():
            for failed in manifest["failed"]:
                if failed["number"] in holes:
                    why = failed["error"].splitlines()[0]
                    self.problem("failed", "samples failed", f"data_{failed['number']}: {why:.150}")
        extra = [number for number in self._files if self.num_samples and number > max(self._expected_numbers())]
        if extra:
            self.problem(
                "extra", "there are samples past the end of the data", *(f"data_{text}" for text in _ranges(extra))
            )
        same: dict[str, list[int]] = {}
        for summary in good:
            same.setdefault(summary.ids_hash, []).append(summary.number)
        repeated = [numbers for numbers in same.values() if len(numbers) > 1]
        if repeated:
            shown = "; ".join(" = ".join(f"data_{n}" for n in numbers[:4]) for numbers in repeated[:SHOWN])
            self.notes.append(f"{len(repeated)} samples occur more than once (in the data too?): {shown}")
        self._name_faults()

    def _name_faults(self) -> None:
        """Damage that speculators without us is known to do."""
        short = [s for s in self.found.values() if any(kind == "rows" for kind, _ in s.problems) and s.rows < s.tokens]
        if short:
            lost = sum(summary.tokens - summary.rows for summary in short)
            self.problem(
                "fault: chunk loss",
                f"{lost} rows are missing at the end of batches: a prompt was split over two scheduler steps, its rest "
                "thrown away (speculators 0.3), or the KV cache was too small (0.4). In the same generate() call, "
                "samples before these carry rows of other samples, every shape right. Extract all of it again.",
                *(f"data_{summary.number}" for summary in short),
            )
        batch = string_order_batch([(s.number, s.tokens, s.mask) for s in self.found.values() if s.mask >= 0])
        if batch:
            self.problem(
                "fault: string order",
                f"masks and tokens are paired as if each batch of {batch} came back in string order of its request ids "
                "(0, 1, 10, 11, ..., 2): speculators 0.4. Tokens and rows fit each other, the masks belong to other "
                "samples, also where their lengths agree. Extract all of it again.",
            )
        if self.layer_ids is not None and self.found:
            unique = len(set(self.layer_ids))
            if unique < len(self.layer_ids) and {s.layers for s in self.found.values()} == {unique}:
                text = f"layers {self.layer_ids} were asked for; speculators drops repetitions and sorts the rest"
                self.problem("fault: layers dropped", text)

    # -- comparisons -----------------------------------------------------------------------------------------------

    def against_data(self, path: Path, model_path: str | None, seed: int | None) -> None:
        """Tokens and masks against the prepared data."""
        from spec_vllm_compat.cli import samples as prepared_data
        from spec_vllm_compat.cli.store import Expected, check_sample

        limit = next(iter(self.manifests.values()))["identity"]["max_seq_len"] if self.manifests else 1 << 30
        prepared = prepared_data.read(
            path,
            max_length=limit,
            vocab_size=1 << 31,
            seed=seed,
            tokenize=prepared_data.tokenizer_of(model_path or "", limit),
        )
        by_number = {sample.number: sample for sample in prepared.samples}
        moved: dict[int, int] = {}
        places = {_ids_hash(sample.input_ids): sample.number for sample in prepared.samples}
        for number, summary in self.found.items():
            sample = by_number.get(number)
            if sample is None or not summary.tokens:
                continue
            # speculators cuts to max_model_len - 1, which DIR does not tell; a prefix is the same sample
            expected = Expected(sample.input_ids[: summary.tokens], sample.loss_mask[: summary.tokens])
            for kind, text in check_sample(summary.path, expected, values=False).problems:
                if kind in ("ids", "mask"):
                    self.problem(kind, "samples are not those of the prepared data", f"data_{number}: {text}")
                if kind == "ids" and summary.ids_hash in places:
                    moved[number] = places[summary.ids_hash]
        if moved:
            pairs = ", ".join(f"data_{number} holds line {place + 1}" for number, place in list(moved.items())[:SHOWN])
            total = max(self.found) + 1
            fits = (b for b in range(11, 513) if all(string_order(b, total, n) == p for n, p in moved.items()))
            batch = next(fits, None)
            if batch:
                self.problems["fault: string order"] = Problem(
                    "fault: string order",
                    f"samples stand in the string order of their request ids, in batches of {batch} (speculators 0.4): "
                    f"{pairs}. Their masks belong to other samples. Extract all of it again.",
                )
            else:
                self.problem("moved", f"samples stand in other places than in the data: {pairs}")
        if not {"ids", "mask"} & set(self.problems):
            self.notes.append(f"tokens and masks are those of {path}, in their places")

    def against_transformers(self, model_path: str, count: int, tolerance: float) -> None:
        """Recompute the rows of some samples, one at a time."""
        import torch

        from spec_vllm_compat.cli.compare import compare

        if self.layer_ids is None:
            raise CompatError(f"{self.root}: expected layer ids in data_config.json or a manifest; found none")
        usable = [summary for summary in self.found.values() if not summary.problems]
        chosen = usable[:: max(1, len(usable) // count)][:count]
        if not chosen:
            raise CompatError(f"{self.root}: expected at least one sound sample to recompute; found none")
        samples = [torch.load(summary.path, map_location="cpu", weights_only=True) for summary in chosen]
        found = compare(model_path, samples, self.layer_ids, tolerance)
        for index, text in found.wrong:
            self.problem("numbers", "rows are not those of the model", f"data_{chosen[index].number}: {text}")
        numbers = ", ".join(str(summary.number) for summary in chosen)
        self.notes.append(f"recomputed with Transformers: samples {numbers}; {found.sentence}")

    # -- the result ------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        return {
            "directory": str(self.root),
            "samples": len(self.found),
            "expected": self.num_samples,
            "tokens": sum(summary.tokens for summary in self.found.values()),
            "bytes": sum(summary.size for summary in self.found.values()),
            "layer_ids": self.layer_ids,
            "manifests": {name: manifest["status"] for name, manifest in self.manifests.items()},
            "problems": [asdict(problem) for problem in self.problems.values()],
            "notes": self.notes,
        }

    def text(self) -> str:
        result = self.result()
        expected = f" of {self.num_samples:,}" if self.num_samples is not None else ""
        lines = [
            f"{self.root}: {result['samples']:,}{expected} samples, {result['tokens']:,} tokens, "
            f"{human(result['bytes'])}, layers {self.layer_ids or 'unknown'}"
        ]
        lines += [f"  {name}: {manifest['status']}" for name, manifest in list(self.manifests.items())[:8]]
        if not self.manifests:
            lines.append("  no manifest: not written by spec-vllm-compat")
        lines += [f"  {note}" for note in self.notes]
        for problem in self.problems.values():
            lines.append(f"WRONG {problem.id}: {problem.text}" + (f" ({len(problem.where)})" if problem.where else ""))
            lines += [f"    {where}" for where in problem.where[:SHOWN]]
            if len(problem.where) > SHOWN:
                lines.append(f"    ... and {len(problem.where) - SHOWN} more")
        lines.append("nothing wrong was found" if not self.problems else f"{len(self.problems)} kinds of problems")
        return "\n".join(lines)


def string_order(batch: int, total: int, number: int) -> int:
    """The sample that speculators 0.4 puts at place ``number`` when it sorts the request ids of a batch as strings."""
    first = number - number % batch
    return first + sorted(range(min(batch, total - first)), key=str)[number - first]


def string_order_batch(lengths: Sequence[tuple[int, int, int]]) -> int | None:
    """The batch size for which string order explains every length of tokens and mask, or None.

    Place j of a batch holds the tokens of sample p(j), and the mask of sample j cut to that many.

    Args:
        lengths: (number, tokens, mask) of each file.
    """
    tokens = {number: count for number, count, _ in lengths}
    masks = {number: count for number, _, count in lengths}
    if tokens == masks or not tokens:
        return None
    total = max(tokens) + 1
    for batch in range(11, min(total, 512) + 1):
        true: dict[int, int] = {}
        for first in range(0, total, batch):
            for number in range(first, min(first + batch, total)):
                if number in tokens:
                    true[string_order(batch, total, number)] = tokens[number]
        if all(number not in true or masks[number] == min(true[number], tokens[number]) for number in masks):
            return batch
    return None


def _ids_hash(ids: Sequence[int]) -> str:
    import torch

    return hashlib.sha256(torch.tensor(list(ids), dtype=torch.long).numpy().tobytes()).hexdigest()


def _ranges(numbers: Sequence[int]) -> list[str]:
    """[1, 2, 3, 7] as ["1-3", "7"]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
