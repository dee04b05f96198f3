"""``verify``: checks a finished or half-finished output, whoever wrote it, and names the fault that it shows."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat.cli import faults
from spec_vllm_compat.cli.progress import Bar, counted, human, shown
from spec_vllm_compat.cli.store import check_sample, find_samples, newer_samples, read_json
from spec_vllm_compat.errors import CompatError

SHOWN = 5  # examples of one problem

HELP = """Check a directory of extracted samples; it may be half-finished, and speculators alone may have written it.

\b
Looked at: every file readable; tokens, loss mask, rows and layers fit each other; no NaN, no rows of zeros; no holes,
no two files of one sample; configuration and manifests consistent; nothing else that the trainer would read.
Damage with a known cause is named: rows lost at a scheduler step (speculators 0.3), results in the string order of
request ids (0.4), layers dropped.

\b
A row is what one layer computed for one token, a vector; a sample has as many rows in each layer as it has tokens.
A hole is a number N below that of the samples asked for, without its data_N.pt.

\b
Only a comparison tells whether the numbers are right:
  --prepared-data FILE                      tokens and masks are those of the data, in their places
  --against transformers --model-path ...   recomputes the rows of some samples
"""

TEXTS = {
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


@dataclass
class Problem:
    """One thing that is wrong, with all samples that show it."""

    id: str
    text: str
    where: list[str] = field(default_factory=list)


@dataclass
class File:
    """What one file holds, as far as later checks need it."""

    number: int
    path: Path
    problems: list[tuple[str, str]]
    size: int
    tokens: int = 0
    mask: int = 0
    rows: int = 0
    layers: int = 0
    kind: str = ""
    ids_hash: int = 0


@click.command("verify", help=HELP, short_help="Check extracted samples.")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Leave the values of the rows unread.")
@click.option("--prepared-data", type=click.Path(exists=True, path_type=Path), help="The data that DIR was made from.")
@click.option("--seed", type=int, help="The --seed of the extraction, with --prepared-data.")
@click.option("--against", type=click.Choice(["transformers"]), help="Recompute rows; needs --model-path.")
@click.option("--model-path", metavar="MODEL", help="Default: the one that DIR was made with.")
@click.option("--samples", default=8, show_default=True, type=click.IntRange(1), help="How many to recompute.")
@click.option("--trust-remote-code", is_flag=True, help="With --against: run the code that the model's folder brings.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(directory: Path, as_json: bool, **given: Any) -> int:
    check = Verification(directory)
    check.run(values=not given["quick"])
    model_path = given["model_path"] or check.model_path
    if given["prepared_data"] is not None:
        check.against_data(given["prepared_data"], model_path, given["seed"])
    if given["against"] is not None:
        if model_path is None:
            raise click.UsageError("--against needs --model-path: DIR does not say which model it was made with")
        check.against_transformers(model_path, given["samples"], trust_remote_code=given["trust_remote_code"])
    click.echo(json.dumps(check.result(), indent=1) if as_json else check.text())
    return 1 if check.problems else 0


class Verification:
    """The checks over one directory. :attr:`problems` is empty when nothing is wrong."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: dict[str, Problem] = {}
        self.notes: list[str] = []
        self.found: dict[int, File] = {}
        self.manifests = {path.name: read_json(path) for path in sorted(root.glob("manifest*.json"))}
        self._files, self._strays = find_samples(root)
        if not self._files and (newer := newer_samples(root)):
            raise CompatError(
                f"{root}: expected data_N.pt; found {counted(len(newer), 'file')} hidden_states/hs_I.safetensors, the format "
                "of speculators 0.5 and newer. `convert` compared each file that it wrote with what it read, so verify the "
                f"folder that was converted, or convert {root} back and verify that."
            )
        self.layer_ids: list[int] | None = None
        self.num_samples: int | None = None
        self.model_path: str | None = None
        self._dtype: str | None = None
        self._read_config()
        self._read_manifests()

    def problem(self, kind: str, text: str | None, *where: str) -> None:
        """Note what is wrong; no text, no problem."""
        if text:
            self.problems.setdefault(kind, Problem(kind, text)).where.extend(where)

    def _read_config(self) -> None:
        config: Any = read_json(self.root / "data_config.json")
        if config is None:
            self.problem("config", "data_config.json is missing: removed, or the extraction did not get that far")
        else:
            self.layer_ids = config["hidden_states"]["layer_ids"]
            self.num_samples = config["data"]["num_samples"]
            self.model_path = config["model"]["target_model_path"]

    def _read_manifests(self) -> None:
        if not self.manifests:
            return
        first: Any = next(iter(self.manifests.values()))
        identity, shards = first["identity"], first["shard"][1]
        for name, manifest in self.manifests.items():
            differing = [key for key, value in manifest["identity"].items() if value != identity.get(key)]
            if differing:
                self.problem("manifest", f"manifests differ in {', '.join(differing)}", name)
        if self.layer_ids not in (None, identity["layer_ids"]):
            text = f"data_config.json says layers {self.layer_ids}, the manifest {identity['layer_ids']}"
            self.problem("config", text)
        self.layer_ids, self._dtype = identity["layer_ids"], identity["save_dtype"]
        self.num_samples, self.model_path = first["num_samples"], first["model"]
        begun = [manifest["shard"] for manifest in self.manifests.values()]
        missing = [str(index) for index in range(shards) if [index, shards] not in begun]
        if missing:
            self.problem("shards", f"of {shards} shards, these have not begun: {', '.join(missing)}")

    # -- the samples -----------------------------------------------------------------------------------------------

    def run(self, *, values: bool) -> None:
        """Read every file; ``values`` reads the rows too."""
        for path in self._strays:
            self.problem("stray", "the trainer takes these files for samples", str(path.relative_to(self.root)))
        for number, paths in self._files.items():
            if len(paths) > 1:
                names = " and ".join(str(path.relative_to(self.root)) for path in paths)
                self.problem("twice", "there are two files of one sample", f"data_{number} ({names})")
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            jobs = ((number, paths[0], values) for number, paths in self._files.items())
            looks = pool.map(lambda job: self._look(*job), jobs)
            self.found = {file.number: file for file in Bar(looks, total=len(self._files), unit=" files", delay=5)}
        self._judge()

    def _look(self, number: int, path: Path, values: bool) -> File:
        layers = None if self.layer_ids is None else len(self.layer_ids)
        problems, sample = check_sample(path, values=values, layers=layers, dtype=self._dtype)
        file = File(number, path, problems, path.stat().st_size)
        if sample is not None:
            ids, states = sample["input_ids"], sample["hidden_states"]
            file.tokens, file.mask, file.layers = len(ids), len(sample["loss_mask"]), len(states)
            file.rows, width = states[0].shape
            file.kind = f"{counted(len(states), 'layer')} of {width} {str(states[0].dtype).removeprefix('torch.')}"
            file.ids_hash = hash(tuple(ids.tolist()))
        return file

    def _judge(self) -> None:
        good = [file for file in self.found.values() if not file.problems]
        for file in self.found.values():
            for kind, text in file.problems:
                self.problem(kind, TEXTS[kind], f"data_{file.number}: {text}")
        kinds = sorted({file.kind for file in good})
        if len(kinds) > 1:
            self.problem("mixed", f"files differ: {', '.join(kinds)}")
        self._look_for_holes()
        same: dict[int, list[int]] = {}
        for file in good:
            same.setdefault(file.ids_hash, []).append(file.number)
        repeated = [" = ".join(f"data_{n}" for n in numbers[:4]) for numbers in same.values() if len(numbers) > 1]
        if repeated:
            self.notes.append(f"samples with the same tokens (in the data too?): {'; '.join(shown(repeated, SHOWN))}")
        self._name_faults()

    def _look_for_holes(self) -> None:
        skipped = {number for manifest in self.manifests.values() for number in manifest["skipped"]}
        total = self.num_samples if self.num_samples is not None else max(self._files, default=-1) + 1
        expected = [number for number in range(total + len(skipped)) if number not in skipped]
        holes = sorted(set(expected) - set(self._files))
        if not self._files:
            self.problem("holes", "no sample is there: no file below DIR is called data_N.pt")
        elif holes:
            self.problem("holes", "samples are not there", *(f"data_{number}" for number in holes))
        for manifest in self.manifests.values():
            for failed in manifest["failed"]:
                if failed["number"] in holes:
                    why = failed["error"].splitlines()[0]
                    self.problem("failed", "samples failed", f"data_{failed['number']}: {why:.150}")
        extra = [number for number in self._files if expected and number > expected[-1]]
        if extra:
            self.problem("extra", "there are samples past the end of the data", *(f"data_{number}" for number in extra))

    def _name_faults(self) -> None:
        files = self.found.values()
        short = [file for file in files if file.rows < file.tokens and "rows" in dict(file.problems)]
        if short:
            lost = sum(file.tokens - file.rows for file in short)
            self.problem("fault: chunk loss", faults.chunk_loss(lost), *(f"data_{file.number}" for file in short))
        lengths = [(file.number, file.tokens, file.mask) for file in files if file.tokens]
        self.problem("fault: string order", faults.string_order_by_lengths(lengths))
        dropped = faults.layers_dropped(self.layer_ids or [], {file.layers for file in files})
        self.problem("fault: layers dropped", dropped)

    # -- comparisons -----------------------------------------------------------------------------------------------

    def against_data(self, path: Path, model_path: str | None, seed: int | None) -> None:
        """Tokens and masks against the prepared data."""
        from spec_vllm_compat.cli import samples as prepared_data

        limit = next(iter(self.manifests.values()))["identity"]["max_seq_len"] if self.manifests else 1 << 30
        tokenize = prepared_data.tokenizer_of(model_path or "", limit)
        prepared = prepared_data.read(path, max_length=limit, vocab_size=1 << 31, seed=seed, tokenize=tokenize)
        places = {hash(tuple(sample.input_ids)): sample.number for sample in prepared.samples}
        by_number = {sample.number: sample for sample in prepared.samples}
        moved: dict[int, int] = {}
        for number, file in self.found.items():
            sample = by_number.get(number)
            if sample is None or not file.tokens:
                continue
            # speculators cuts to max_model_len - 1, which DIR does not tell; a prefix is the same sample
            problems, _ = check_sample(
                file.path, input_ids=sample.input_ids[: file.tokens], loss_mask=sample.loss_mask[: file.tokens]
            )
            for kind, text in problems:
                if kind in ("ids", "mask"):
                    self.problem(kind, "samples are not those of the prepared data", f"data_{number}: {text}")
                if kind == "ids" and file.ids_hash in places:
                    moved[number] = places[file.ids_hash]
        if moved:
            where = [f"data_{number} holds line {place + 1}" for number, place in moved.items()]
            fault = faults.string_order_by_places(moved, max(self.found) + 1)
            kind = "fault: string order" if fault else "moved"
            self.problems[kind] = Problem(kind, fault or "samples stand in other places than in the data", where)
        if not {"ids", "mask"} & set(self.problems):
            self.notes.append(f"tokens and masks are those of {path}, in their places")

    def against_transformers(self, model_path: str, count: int, *, trust_remote_code: bool = False) -> None:
        """Recompute the rows of some samples, one at a time."""
        import torch

        from spec_vllm_compat.cli.compare import compare
        from spec_vllm_compat.cli.target import read_target

        read_target(model_path, trust_remote_code=trust_remote_code)
        if self.layer_ids is None:
            raise CompatError(f"{self.root}: expected layer ids in data_config.json or a manifest; found none")
        usable = [file for file in self.found.values() if not file.problems]
        chosen = usable[:: max(1, len(usable) // count)][:count]
        if not chosen:
            raise CompatError(f"{self.root}: expected at least one sound sample to recompute; found none")
        samples = [torch.load(file.path, map_location="cpu", weights_only=True) for file in chosen]
        sentence, wrong = compare(model_path, samples, self.layer_ids, trust_remote_code=trust_remote_code)
        for index, text in wrong:
            self.problem("numbers", "rows are not those of the model", f"data_{chosen[index].number}: {text}")
        numbers = ", ".join(str(file.number) for file in chosen)
        self.notes.append(f"recomputed with Transformers: samples {numbers}; {sentence}")

    # -- the result ------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        return {
            "directory": str(self.root),
            "samples": len(self.found),
            "expected": self.num_samples,
            "tokens": sum(file.tokens for file in self.found.values()),
            "bytes": sum(file.size for file in self.found.values()),
            "layer_ids": self.layer_ids,
            "manifests": {name: manifest["status"] for name, manifest in self.manifests.items()},
            "problems": [asdict(problem) for problem in self.problems.values()],
            "notes": self.notes,
        }

    def text(self) -> str:
        result = self.result()
        expected = "" if self.num_samples is None else f"{len(self.found):,} of "
        lines = [
            f"{self.root}: {expected}{counted(self.num_samples or len(self.found), 'sample')}, "
            f"{counted(result['tokens'], 'token')}, {human(result['bytes'])}, layers {self.layer_ids or 'unknown'}",
            *(f"  {name}: {status}" for name, status in list(result["manifests"].items())[:8]),
            *(["  no manifest: not written by spec-vllm-compat"] if not self.manifests else []),
            *(f"  {note}" for note in self.notes),
        ]
        for problem in self.problems.values():
            lines.append(f"WRONG {problem.id}: {problem.text}" + (f" ({len(problem.where)})" if problem.where else ""))
            lines += [f"    {where}" for where in shown(problem.where, SHOWN)]
        lines.append(
            f"{counted(len(self.problems), 'kind')} of problem" if self.problems else "nothing wrong was found"
        )
        return "\n".join(lines)
