"""The loop of ``extract``: batches in, files out, and what happens when a sample, the disk or the user stops it."""

from __future__ import annotations

import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import click

from spec_vllm_compat.cli.plan import WINDOW, Plan, batches, now
from spec_vllm_compat.cli.progress import Progress, clock, counted, human
from spec_vllm_compat.cli.samples import Sample
from spec_vllm_compat.cli.store import write_sample
from spec_vllm_compat.errors import CompatError

MANIFEST_EVERY = 60.0  # seconds


def speculators_generator(**kwargs: Any) -> Any:
    from speculators.data_generation import VllmHiddenStatesGenerator

    return VllmHiddenStatesGenerator(**kwargs)


class _Stop(Exception):
    """The job ends before its time; the message says why and how to go on."""


class Job:
    """Does what a plan says."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.options = plan, plan.options
        self._failed_in_a_row = self._interrupts = 0
        self._extracting = False

    def run(self, build: Callable[..., Any]) -> int:
        """Returns the exit status: 1 while samples are missing."""
        plan, options, why, load = self.plan, self.options, None, 0.0
        missing = plan.missing()
        plan.begin(missing)
        progress: Progress | None = None
        started = time.monotonic()
        try:
            with self._interrupts_counted():
                if missing:
                    generator = build(
                        model_path=options.model_path, layer_ids=plan.layer_ids, max_model_len=plan.limit + 1,
                        gpu_memory_utilization=options.gpu_memory_utilization, tensor_parallel_size=options.tp_size,
                    )  # fmt: skip
                    self._note(generator)
                    load = time.monotonic() - started
                    progress = Progress(sum(len(sample.input_ids) for sample in missing), len(missing))
                    self._extract(generator, missing, progress)
        except _Stop as stop:
            why = str(stop)
        except KeyboardInterrupt:
            why = "interrupted at once. The same command goes on."
        except BaseException as error:
            self._finish(missing, progress, load, f"{type(error).__name__}: {error}")
            raise
        return self._finish(missing, progress, load, why)

    def _note(self, generator: Any) -> None:
        from spec_vllm_compat import report

        self._extracting = True
        actual = str(generator.vllm_config.model_config.dtype).removeprefix("torch.")
        if self.options.save_dtype == "auto" and actual != self.plan.dtype:
            raise CompatError(f"expected {self.plan.dtype} rows from the model's configuration; vLLM runs {actual}. "
                              f"Pass --save-dtype {actual}.")  # fmt: skip
        self.plan.manifest["patch_sets"] = list(report().applied)
        self.plan.write_manifest()

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

    def _extract(self, generator: Any, missing: Sequence[Sample], progress: Progress) -> None:
        wanted = {sample.number for sample in missing}
        writing: deque[tuple[Sample, Future[int]]] = deque()  # beside the extraction; memory stays bounded
        with ThreadPoolExecutor(4, "write") as pool:
            try:
                for batch in batches(self.plan.own, self.options.batch_size, self.options.shard_size or WINDOW):
                    # The whole batch, also for one hole in it: rounding depends on what is computed together, and so a
                    # job that was broken off ends with the same bytes as one that was not.
                    if not wanted.intersection(sample.number for sample in batch):
                        continue
                    for sample, result in self._results(generator, batch, wanted, progress):
                        if len(writing) >= 2 * self.options.batch_size:
                            self._take_one(writing, progress)
                        writing.append((sample, pool.submit(write_sample, self.plan.path(sample), result)))
                    if time.monotonic() - self.plan.manifest_written > MANIFEST_EVERY:
                        self.plan.write_manifest()
                    if self._interrupts:
                        raise _Stop("interrupted; the running batch was finished. The same command goes on.")
            finally:  # everything that was extracted is on disk, whatever ended it
                while writing:
                    self._take_one(writing, progress)

    def _take_one(self, writing: deque[tuple[Sample, Future[int]]], progress: Progress) -> None:
        sample, future = writing.popleft()
        try:
            progress.add(done=1, tokens=len(sample.input_ids), size=future.result())
        except OSError as error:
            text = f"data_{sample.number} cannot be written: {error}. Make room, then run the same again."
            raise _Stop(text) from None

    def _results(
        self, generator: Any, batch: Sequence[Sample], wanted: set[int], progress: Progress
    ) -> Iterator[tuple[Sample, dict[str, Any]]]:
        try:
            results = generator.generate([list(sample.input_ids) for sample in batch])
        except Exception as error:  # noqa: BLE001 - noted, and too many end the job
            if len(batch) == 1:
                self._fail(batch[0], error, progress)
            else:  # one of them is at fault; the others shall not suffer
                for sample in batch:
                    if sample.number in wanted:
                        yield from self._results(generator, [sample], wanted, progress)
            return
        for sample, result in zip(batch, results, strict=True):
            if sample.number in wanted:
                try:
                    kept = self._to_save(sample, result)
                except CompatError as error:
                    self._fail(sample, error, progress)
                else:
                    self._failed_in_a_row = 0
                    yield sample, kept

    def _fail(self, sample: Sample, error: Exception, progress: Progress) -> None:
        text = f"{type(error).__name__}: {error}"
        click.echo(f"line {sample.line} (data_{sample.number}) failed: {text:.300}", err=True)
        self.plan.manifest["failed"].append({"number": sample.number, "line": sample.line, "error": text[:2000]})
        self._failed_in_a_row += 1
        progress.add(failed=1)
        if self.options.fail_on_error or self._failed_in_a_row >= self.options.max_failures:
            raise _Stop(f"{counted(self._failed_in_a_row, 'sample')} failed in a row: {text:.300}")

    def _to_save(self, sample: Sample, result: dict[str, Any]) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.plan.dtype)
        states = []
        for layer, rows in zip(self.plan.layer_ids, result["hidden_states"], strict=True):
            kept = rows.to(dtype).contiguous()
            if kept.dtype != rows.dtype and not torch.isfinite(kept).all():
                raise CompatError(f"layer {layer} holds values that {dtype} cannot; choose another --save-dtype")
            # torch.save writes the whole storage of a view
            states.append(kept if kept.untyped_storage().nbytes() == kept.nbytes else kept.clone())
        ids = result["input_ids"]
        if ids.tolist() != sample.input_ids.tolist():
            raise CompatError(f"asked for {len(sample.input_ids)} tokens, got the rows of {len(ids)} others")
        mask = torch.tensor(list(sample.loss_mask), dtype=torch.long)
        return {"input_ids": ids, "hidden_states": states, "loss_mask": mask}

    def _finish(self, missing: Sequence[Sample], progress: Progress | None, load: float, why: str | None) -> int:
        done, failed, tokens, size, seconds = 0, 0, 0, 0, 0.0
        if progress is not None:
            progress.close()
            done, failed, tokens, size = progress.done, progress.failed, progress.n, progress.bytes
            seconds = progress.seconds
        own, left, manifest = len(self.plan.own), len(missing) - done, self.plan.manifest
        manifest["status"] = status = "complete" if not left else "stopped" if why else "with failures"
        manifest["runs"][-1] |= {
            "ended": now(), "ok": done, "failed": failed, "tokens": tokens, "bytes": size,
            "load_seconds": round(load, 1), "seconds": round(seconds, 1), "why": why,
        }  # fmt: skip
        self.plan.write_manifest()
        failures = f", {failed} failed" if failed else ""
        click.echo(f"{status}: {own - left} of {counted(own, 'sample')} there{failures}")
        if done:
            rates = f"{done / seconds:,.1f} samples/s, {tokens / seconds:,.0f} tokens/s"
            amount = f"{counted(done, 'sample')}, {counted(tokens, 'token')}, {human(size)}"
            click.echo(f"  this run   {amount} in {clock(seconds)} ({rates}), model load {clock(load)} apart")
        click.echo(f"  where      {self.plan.root}, {self.plan.manifest_path.name}")
        if why:
            click.echo(f"stopped: {why}", err=True)
        elif left:
            click.echo("the samples that failed are named in the manifest; the same command tries them again", err=True)
        else:
            click.echo(f"  next       spec-vllm-compat verify {shlex.quote(str(self.plan.root))}")
        return 1 if left else 0
