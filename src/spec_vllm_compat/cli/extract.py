"""``extract``: the job itself, for people who do not want to write a script."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import compress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from spec_vllm_compat._version import __version__
from spec_vllm_compat.cli import samples as prepared_data
from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import Progress, clock, human
from spec_vllm_compat.cli.samples import Prepared, Sample
from spec_vllm_compat.cli.target import TargetModel, read_target
from spec_vllm_compat.errors import CompatError

LAYER_MEANING = (
    "layer id k is the output of decoder block k, before the final norm; Transformers' hidden_states[k + 1], "
    "and for the last block what goes into the final norm"
)
WINDOW = 2000  # samples sorted by length together, so that shards fill up one after the other
MANIFEST_EVERY = 60.0  # seconds

HELP = f"""Extract hidden states of prepared data into DIR, in the form that speculators' trainer reads.

\b
{prepared_data.FORMATS}

Everything that can be checked is checked before the model loads: the lines of the data, the layers, free disk. Files
appear whole or not at all. Kill it, start it again with the same options: what is there is checked, the rest is filled
in. Ctrl-C finishes the running batch; a second Ctrl-C stops at once.

Several GPUs or hosts: start N of them with --num-shards N --shard-index 0 ... N-1 and the same DIR (a SLURM array,
one a GPU with CUDA_VISIBLE_DEVICES); `verify DIR` looks at all together.

\b
  spec-vllm-compat extract --model-path Qwen/Qwen3-8B --prepared-data tokenized.jsonl --output-dir hidden \\
      --layer-ids 2 18 33 35 --batch-size 16 --max-seq-len 2048
"""


@dataclass(frozen=True)
class Options:
    """The command line of ``extract``."""

    model_path: str
    prepared_data: Path
    output_dir: Path
    layer_ids: tuple[int, ...] = ()
    batch_size: int = 8
    max_seq_len: int = 2048
    tp_size: int = 1
    gpu_memory_utilization: float = 0.8
    max_samples: int | None = None
    seed: int | None = None
    resume: bool = True
    shard_size: int = 2000
    save_dtype: str = "auto"
    num_shards: int = 1
    shard_index: int = 0
    fail_on_error: bool = False
    skip_bad_lines: bool = False
    max_failures: int = 5
    trust_remote_code: bool = False
    token_freq_path: Path | None = None


@click.command("extract", help=HELP, short_help="Extract hidden states; resumable.", cls=ManyValues)
@click.option("--model-path", required=True, metavar="MODEL", help="Folder or hub id of the target model.")
@click.option(
    "--prepared-data", required=True, type=click.Path(path_type=Path), help="JSONL, Parquet or a datasets folder."
)
@click.option("--output-dir", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@layer_ids_option("Layers to save, in this order. Default: speculators' choice.")
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(1), help="Sequences a call.")
@click.option("--max-seq-len", default=2048, show_default=True, type=click.IntRange(1), help="Longer samples are cut.")
@click.option("--tp-size", default=1, show_default=True, type=click.IntRange(1), help="GPUs that share the model.")
@click.option("--gpu-memory-utilization", default=0.8, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--max-samples", type=click.IntRange(1), help="Take so many samples. Default: all.")
@click.option("--seed", type=int, help="Shuffle before numbering and taking. Default: keep the order of the data.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="--no-resume wants a DIR without samples.")
@click.option(
    "--shard-size", default=2000, show_default=True, type=click.IntRange(0), help="Samples a rows_A-B; 0: flat."
)
@click.option("--save-dtype", default="auto", show_default=True, help="auto is the model's own.",
              type=click.Choice(["auto", "bfloat16", "float16", "float32"]))  # fmt: skip
@click.option(
    "--num-shards", default=1, show_default=True, type=click.IntRange(1), help="Split the data for so many jobs."
)
@click.option(
    "--shard-index", default=0, show_default=True, type=click.IntRange(0), help="The part that this job does."
)
@click.option("--fail-on-error", is_flag=True, help="Stop at the first sample that fails.")
@click.option("--skip-bad-lines", is_flag=True, help="Leave out lines that are no samples; their numbers stay free.")
@click.option(
    "--max-failures", default=5, show_default=True, type=click.IntRange(1), help="Stop after so many in a row."
)
@click.option(
    "--token-freq-path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the token frequencies that a smaller draft vocabulary is built from; outside of DIR.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the model's folder brings.")
def command(**values: Any) -> int:
    options = Options(**{**values, "layer_ids": tuple(values["layer_ids"])})
    if options.shard_index >= options.num_shards:
        raise click.UsageError(f"--shard-index is 0 to {options.num_shards - 1} with --num-shards {options.num_shards}")
    return extract(options)


def extract(options: Options, build: Callable[..., Any] | None = None) -> int:
    """Run the job; ``build`` makes the generator (by default speculators' own). Returns the exit status."""
    target = read_target(options.model_path)
    if target.own_code and not options.trust_remote_code:
        raise CompatError(f"{options.model_path} brings its own Python code; read it, then pass --trust-remote-code")
    layer_ids = target.layer_ids(options.layer_ids)
    limit = _limit(options, target)
    prepared = prepared_data.read(
        options.prepared_data,
        max_length=limit,
        vocab_size=target.vocab_size,
        max_samples=options.max_samples,
        seed=options.seed,
        tokenize=prepared_data.tokenizer_of(options.model_path, limit),
    )
    _say_bad_lines(options, prepared)
    if prepared.cut:
        click.echo(f"{prepared.cut} of {len(prepared.samples)} samples are longer than {limit} tokens and are cut")
    if not prepared.samples:
        raise CompatError("no usable sample is left")
    if options.token_freq_path is not None:
        _write_token_frequencies(options, prepared)
    from spec_vllm_compat.cli.store import locked

    options.output_dir.mkdir(parents=True, exist_ok=True)
    lock = options.output_dir / f".{_manifest_name(options)}.lock"
    with locked(lock):
        job = Job(options, target, layer_ids, limit, prepared)
        return job.run(build or _speculators_generator)


def _limit(options: Options, target: TargetModel) -> int:
    """Longest sample. vLLM wants room for one more token; speculators takes it from the sample, we add it."""
    return min(options.max_seq_len, (target.max_length or sys.maxsize) - 1)


def _say_bad_lines(options: Options, prepared: Prepared) -> None:
    if not prepared.bad:
        return
    lines = [f"  line {bad.line}: {bad.reason}" for bad in prepared.bad[:10]]
    if len(prepared.bad) > 10:
        lines.append(f"  ... and {len(prepared.bad) - 10} more")
    text = f"{options.prepared_data}: {len(prepared.bad)} lines are no samples:\n" + "\n".join(lines)
    if not options.skip_bad_lines:
        raise CompatError(f"{text}\nRepair them, or pass --skip-bad-lines. Nothing was started.")
    click.echo(text, err=True)


def _write_token_frequencies(options: Options, prepared: Prepared) -> None:
    """What speculators' ``save_token_frequency_distribution`` writes: how often each token is trained on."""
    from spec_vllm_compat.cli.store import write_sample

    path = options.token_freq_path
    if path is None or options.output_dir.resolve() in path.resolve().parents:
        raise CompatError(f"--token-freq-path {path}: the trainer takes every .pt in {options.output_dir} for a sample")
    counts: Counter[int] = Counter()
    for sample in prepared.samples:
        counts.update(compress(sample.input_ids, sample.loss_mask))
    write_sample(path, dict(counts))


def _manifest_name(options: Options) -> str:
    return "manifest" if options.num_shards == 1 else f"manifest-{options.shard_index}-of-{options.num_shards}"


def _speculators_generator(**kwargs: Any) -> Any:
    import spec_vllm_compat  # noqa: F401, I001 - before speculators
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    return VllmHiddenStatesGenerator(**kwargs)


class _Stop(Exception):
    """The job ends before its time; the message says why and how to go on."""


@dataclass
class _Failures:
    in_a_row: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)


class Job:
    """One shard of one extraction: decides what is to be done, does it, and keeps the manifest."""

    def __init__(
        self, options: Options, target: TargetModel, layer_ids: list[int], limit: int, prepared: Prepared
    ) -> None:
        from spec_vllm_compat.cli.store import Layout

        self.options, self.target, self.layer_ids, self.limit = options, target, layer_ids, limit
        self.prepared = prepared
        self.layout = Layout(options.output_dir, options.shard_size)
        total = len(prepared.samples)
        self.own = prepared.samples[
            total * options.shard_index // options.num_shards : total * (options.shard_index + 1) // options.num_shards
        ]
        self.dtype = target.dtype if options.save_dtype == "auto" else options.save_dtype
        self.failures = _Failures()
        self._manifest_path = options.output_dir / f"{_manifest_name(options)}.json"
        self._manifest_written = 0.0
        self._interrupts = 0
        self._extracting = False
        self._other_data = False
        self.manifest = self._new_manifest()

    # -- before the model loads ------------------------------------------------------------------------------------

    def _new_manifest(self) -> dict[str, Any]:
        from spec_vllm_compat.cli.store import read_json
        from spec_vllm_compat.versions import detect

        identity = {
            "model_hash": self.target.fingerprint(),
            "data_hash": self.prepared.fingerprint,
            "layer_ids": self.layer_ids,
            "max_seq_len": self.limit,
            "shard_size": self.options.shard_size,
            "save_dtype": self.dtype,
        }
        before = self._other_manifests()
        for path, manifest in before.items():
            for key, value in identity.items():
                if manifest["identity"].get(key) == value:
                    continue
                if key == "data_hash" and path == self._manifest_path:
                    self._other_data = True  # more samples than last time, perhaps; those on disk will tell
                else:
                    raise CompatError(
                        f"{path} has another {key}: expected {value}; found {manifest['identity'].get(key)}. "
                        "Use the options of that run, or another --output-dir."
                    )
        own = read_json(self._manifest_path)
        return {
            "format": 1,
            "model": self.target.path,
            "identity": identity,
            "shard": [self.options.shard_index, self.options.num_shards],
            "numbers": [sample.number for sample in (self.own[:1] + self.own[-1:])],
            "num_samples": len(self.prepared.samples),
            "cut": self.prepared.cut,
            "skipped": [bad.number for bad in self.prepared.bad],
            "layer_meaning": LAYER_MEANING,
            "pre_norm": True,
            "hidden_size": self.target.hidden_size,
            "versions": {"spec_vllm_compat": __version__, **{v.module: v.text for v in detect()}},
            "patch_sets": [],
            "status": "running",
            "failed": [],
            "runs": [*(own["runs"] if own else []), {"command": _command_line(), "started": _now()}],
        }

    def _other_manifests(self) -> dict[Path, Any]:
        from spec_vllm_compat.cli.store import find_samples, read_json

        found = {path: read_json(path) for path in sorted(self.options.output_dir.glob("manifest*.json"))}
        samples, _ = find_samples(self.options.output_dir)
        if samples and not found:
            raise CompatError(
                f"{self.options.output_dir} holds {len(samples)} samples and no manifest: something else wrote them. "
                "`verify` tells what they are worth; extract into another --output-dir."
            )
        if samples and not self.options.resume and self.options.num_shards == 1:
            raise CompatError(
                f"--no-resume wants an empty directory, and {self.options.output_dir} holds {len(samples)} samples. "
                "Leave it out to go on with them, or use another --output-dir."
            )
        return found

    def _missing(self) -> tuple[list[Sample], list[str]]:
        """Samples that are not there or not what they must be, and what is wrong with those that are there."""
        from spec_vllm_compat.cli.store import Expected, check_sample, remove_parts

        remove_parts(self.layout, [sample.number for sample in self.own])
        missing, wrong = [], []
        for sample in self.own:
            path = self.layout.path(sample.number)
            if not path.exists():
                missing.append(sample)
                continue
            expected = Expected(
                sample.input_ids, sample.loss_mask, len(self.layer_ids), self.target.hidden_size, self.dtype
            )
            problems = check_sample(path, expected, values=False).problems
            if self._other_data and {"ids", "mask"} & {kind for kind, _ in problems}:
                raise CompatError(
                    f"{path} holds another sample than line {sample.line} of {self.options.prepared_data}: the "
                    "directory was made from other data. Use those data, or another --output-dir."
                )
            if problems:
                missing.append(sample)
                wrong.append(f"{path.name}: {problems[0][1]}")
        return missing, wrong

    def _check_disk(self, missing: Sequence[Sample]) -> None:
        need = sum(self._size(sample) for sample in missing)
        free = shutil.disk_usage(self.options.output_dir).free
        click.echo(f"to extract: {len(missing)} of {len(self.own)} samples, {human(need)}; {human(free)} are free")
        if need > free * 0.98:
            raise CompatError(
                f"{self.options.output_dir}: expected {human(need)} of free disk; found {human(free)}. Free some, "
                "choose another --output-dir, or take fewer samples or layers. Nothing was started."
            )

    def _size(self, sample: Sample) -> int:
        width = 4 if self.dtype == "float32" else 2
        return len(sample.input_ids) * (len(self.layer_ids) * self.target.hidden_size * width + 16) + 4096

    # -- the job ---------------------------------------------------------------------------------------------------

    def run(self, build: Callable[..., Any]) -> int:
        missing, wrong = self._missing()
        for text in wrong[:5]:
            click.echo(f"extracting again: {text}", err=True)
        if len(wrong) > 5:
            click.echo(f"extracting again: {len(wrong) - 5} more", err=True)
        self._check_disk(missing)
        self._write_lengths()
        self._write_manifest()
        started = time.monotonic()
        progress = Progress(len(missing), sum(len(sample.input_ids) for sample in missing))
        load = 0.0
        why = None
        try:
            with self._interrupts_counted():
                if missing:
                    with _workers_deaf_to_ctrl_c():
                        generator = build(
                            model_path=self.options.model_path,
                            layer_ids=self.layer_ids,
                            max_model_len=self.limit + 1,
                            gpu_memory_utilization=self.options.gpu_memory_utilization,
                            tensor_parallel_size=self.options.tp_size,
                        )
                    load = time.monotonic() - started
                    self._note_generator(generator)
                    progress.started = time.monotonic()
                    self._extract(generator, missing, progress)
                else:
                    self._write_config(self._stand_in())
        except _Stop as stop:
            why = str(stop)
        except KeyboardInterrupt:
            why = "interrupted at once. The same command goes on."
        except BaseException as error:
            self._finish(progress, load, f"{type(error).__name__}: {error}")
            raise
        return self._finish(progress, load, why)

    def _extract(self, generator: Any, missing: Sequence[Sample], progress: Progress) -> None:
        with Writer(self.layout, 2 * self.options.batch_size, progress) as writer:
            numbers = {sample.number for sample in missing}
            for batch in batches(self.own, self.options.batch_size, self.options.shard_size or WINDOW):
                if not numbers.intersection(sample.number for sample in batch):
                    continue
                # The whole batch, also for one hole in it: rounding depends on what is computed together, and so a
                # job that was broken off ends with the same bytes as one that was not.
                for sample, result in self._results(generator, batch, numbers, progress):
                    writer.put(sample, result)
                progress.show()
                if time.monotonic() - self._manifest_written > MANIFEST_EVERY:
                    self._write_manifest()
                if self._interrupts:
                    raise _Stop("interrupted; the running batch was finished. The same command goes on.")

    def _results(
        self, generator: Any, batch: Sequence[Sample], wanted: set[int], progress: Progress
    ) -> Iterator[tuple[Sample, dict[str, Any]]]:
        try:
            results = generator.generate([list(sample.input_ids) for sample in batch])
        except Exception as error:
            if self.options.fail_on_error:
                raise
            if len(batch) == 1:
                self._fail(batch[0], error, progress)
            else:  # one of them is at fault; the others shall not suffer
                for sample in batch:
                    if sample.number in wanted:
                        yield from self._results(generator, [sample], wanted, progress)
            return
        for sample, result in zip(batch, results, strict=True):
            if sample.number not in wanted:
                continue
            try:
                kept = self._to_save(sample, result)
            except CompatError as error:
                if self.options.fail_on_error:
                    raise
                self._fail(sample, error, progress)
                continue
            self.failures.in_a_row = 0
            yield sample, kept

    def _fail(self, sample: Sample, error: Exception, progress: Progress) -> None:
        text = f"{type(error).__name__}: {error}"
        click.echo(f"line {sample.line} (data_{sample.number}) failed: {text:.300}", err=True)
        self.failures.seen.append({"number": sample.number, "line": sample.line, "error": text[:2000]})
        self.failures.in_a_row += 1
        progress.add(failed=1)
        if self.failures.in_a_row >= self.options.max_failures:
            raise _Stop(f"{self.failures.in_a_row} samples failed in a row: {text:.300}")

    def _to_save(self, sample: Sample, result: dict[str, Any]) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.dtype)
        states = []
        for layer, rows in zip(self.layer_ids, result["hidden_states"], strict=True):
            kept = rows.to(dtype).contiguous()
            if kept.dtype != rows.dtype and not torch.isfinite(kept).all():
                raise CompatError(f"layer {layer} holds values that {self.dtype} cannot; choose another --save-dtype")
            # torch.save writes the whole storage of a view
            states.append(kept if kept.untyped_storage().nbytes() == kept.nbytes else kept.clone())
        ids = result["input_ids"]
        if ids.tolist() != sample.input_ids.tolist():
            raise CompatError(f"asked for {len(sample.input_ids)} tokens, got the rows of {len(ids)} others")
        mask = torch.tensor(list(sample.loss_mask), dtype=torch.long)
        return {"input_ids": ids, "hidden_states": states, "loss_mask": mask}

    @contextmanager
    def _interrupts_counted(self) -> Iterator[None]:
        """The first Ctrl-C while samples are extracted lets the batch end; any other one stops at once."""

        def count(_signal: int, _frame: Any) -> None:
            self._interrupts += 1
            if self._interrupts > 1 or not self._extracting:
                raise KeyboardInterrupt
            click.echo("\ninterrupted: finishing the batch (Ctrl-C again stops at once)", err=True)

        previous = signal.signal(signal.SIGINT, count)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # -- what is kept beside the samples ----------------------------------------------------------------------------

    def _note_generator(self, generator: Any) -> None:
        from spec_vllm_compat import report

        self._extracting = True
        actual = str(generator.vllm_config.model_config.dtype).removeprefix("torch.")
        if self.options.save_dtype == "auto" and actual != self.dtype:
            raise CompatError(f"expected {self.dtype} rows from the model's configuration; vLLM runs {actual}. "
                              f"Pass --save-dtype {actual}.")  # fmt: skip
        self.manifest["patch_sets"] = list(report().applied)
        self._write_config(generator)
        self._write_manifest()

    def _stand_in(self) -> Any:
        """What speculators' configuration writer asks of a generator, for a job that needs no model any more."""
        cache = SimpleNamespace(gpu_memory_utilization=self.options.gpu_memory_utilization)
        return SimpleNamespace(
            model_path=self.options.model_path,
            tensor_parallel_size=self.options.tp_size,
            layer_ids=self.layer_ids,
            vllm_config=SimpleNamespace(cache_config=cache),
        )

    def _write_config(self, generator: Any) -> None:
        from speculators.data_generation import config_generator

        from spec_vllm_compat.cli.store import write_json

        with _device_names_cannot_fail(config_generator):
            config = config_generator.DataGenerationConfig.from_generator(
                generator=generator,
                train_data_path=str(self.options.prepared_data),
                seq_length=self.limit,
                cache_dir="",
                num_samples=len(self.prepared.samples),
                max_samples=self.options.max_samples,
                seed=self.options.seed or 0,
            )
        write_json(self.options.output_dir / "data_config.json", config.to_dict())

    def _write_lengths(self) -> None:
        """Known beforehand for all shards, so that jobs side by side write the same."""
        from spec_vllm_compat.cli.store import link_lengths, write_json

        lengths = {str(sample.number): len(sample.input_ids) for sample in self.prepared.samples}
        write_json(self.options.output_dir / "sample_lengths.json", lengths)
        for folder in sorted({self.layout.path(sample.number).parent for sample in self.own}):
            folder.mkdir(exist_ok=True)
            link_lengths(self.layout, folder)

    def _write_manifest(self) -> None:
        from spec_vllm_compat.cli.store import write_json

        self._manifest_written = time.monotonic()
        write_json(self._manifest_path, {**self.manifest, "failed": self.failures.seen})

    def _finish(self, progress: Progress, load: float, why: str | None) -> int:
        left = progress.total - progress.done
        status = "complete" if not left else "stopped" if why else "with failures"
        self.manifest["status"] = status
        self.manifest["runs"][-1].update(
            ended=_now(), ok=progress.done, failed=progress.failed, tokens=progress.tokens, bytes=progress.bytes,
            load_seconds=round(load, 1), seconds=round(progress.seconds, 1), why=why,
        )  # fmt: skip
        self._write_manifest()
        if progress.total:
            progress.show(last=True)
        rates = f"{progress.done / progress.seconds:,.1f} samples/s, {progress.tokens / progress.seconds:,.0f} tokens/s"
        there = len(self.own) - left
        click.echo(
            f"{status}: {there} of {len(self.own)} samples are there"
            + (f", {progress.failed} failed" if progress.failed else "")
            + (
                f"\n  this run   {progress.done} samples, {progress.tokens:,} tokens, {human(progress.bytes)} in "
                f"{clock(progress.seconds)} ({rates}), model load {clock(load)} apart"
                if progress.total
                else ""
            )
            + f"\n  where      {self.options.output_dir}, {self._manifest_path.name}"
        )
        if why:
            click.echo(f"stopped: {why}", err=True)
        elif left:
            click.echo("the samples that failed are named in the manifest; the same command tries them again", err=True)
        else:
            click.echo(f"  next       spec-vllm-compat verify {shlex.quote(str(self.options.output_dir))}")
        return 1 if left else 0


def batches(samples: Sequence[Sample], size: int, window: int) -> Iterator[list[Sample]]:
    """Batches of like lengths, the longest first, so that memory runs out at once or never; numbers stay."""
    by_window: dict[int, list[Sample]] = {}
    for sample in samples:
        by_window.setdefault(sample.number // window, []).append(sample)
    for group in by_window.values():
        group.sort(key=lambda sample: (-len(sample.input_ids), sample.number))
        for begin in range(0, len(group), size):
            yield group[begin : begin + size]


class Writer:
    """Writes samples beside the extraction; at most ``room`` wait, so that memory stays bounded."""

    def __init__(self, layout: Any, room: int, progress: Progress) -> None:
        self._layout, self._room, self._progress = layout, room, progress
        self._pool = ThreadPoolExecutor(4, "write")
        self._waiting: deque[tuple[Sample, Future[int]]] = deque()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_exc: Any) -> None:
        """Everything that was extracted is on disk before the block ends, whatever ended it."""
        try:
            while self._waiting:
                self._take_one()
        finally:
            self._pool.shutdown()

    def put(self, sample: Sample, result: dict[str, Any]) -> None:
        from spec_vllm_compat.cli.store import write_sample

        while len(self._waiting) >= self._room:
            self._take_one()
        self._waiting.append((sample, self._pool.submit(write_sample, self._layout.path(sample.number), result)))

    def _take_one(self) -> None:
        sample, future = self._waiting.popleft()
        try:
            size = future.result()
        except OSError as error:
            raise _Stop(
                f"data_{sample.number} cannot be written: {error}. Make room, then run the same again."
            ) from None
        self._progress.add(done=1, tokens=len(sample.input_ids), size=size)


@contextmanager
def _workers_deaf_to_ctrl_c() -> Iterator[None]:
    """A terminal sends Ctrl-C to the workers too, and vLLM's end on it; the batch could not be finished.

    A blocked signal stays blocked in a started process, whatever handlers it sets.
    """
    start = BaseProcess.start

    def start_deaf(self: BaseProcess) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            start(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    BaseProcess.start = start_deaf  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]


@contextmanager
def _device_names_cannot_fail(module: Any) -> Iterator[None]:
    """speculators 0.4 asks a CUDA build of torch for a device's name where there is no driver: RuntimeError."""
    original = getattr(module, "get_device_name", None)
    if original is None:
        yield
        return

    def name(index: int) -> Any:
        try:
            return original(index)
        except RuntimeError:
            return "NO ACCELERATOR"

    module.get_device_name = name
    try:
        yield
    finally:
        module.get_device_name = original


def _command_line() -> str:
    return shlex.join(["spec-vllm-compat", *sys.argv[1:]])


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
