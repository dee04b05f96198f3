#!/usr/bin/env python3
"""What the checks of `generate()` cost, in percent of prefill time.

    python benchmarks/guard.py                                        # sizes for a CPU
    python benchmarks/guard.py --model PATH --sequences 16 --tokens 2048   # an 8B checkpoint on a GPU
    python benchmarks/guard.py --layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 \
        --vocabulary 128256 --sequences 16 --tokens 2048              # the same with random weights

Two measurements of the same calls. *Added up*: the time inside every check, in driver and worker, with the device
synchronised before and after those that run on it; this is exact but counts overlap as cost. *With and without*: calls
with all checks and calls with none take turns, and the medians are compared; this is what a user feels, and noisy where
the difference is small. Prefill time is the time inside vLLM's `execute_model`, without any check, device synchronised.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import random_model

DRIVER_CHECKS = ("complete", "check")


def _worker(worker: Any, mode: str) -> dict[str, float]:
    """In the worker: choose how checks run from now on (``timed``, ``off`` or ``on``); times since the last call."""
    import time

    import torch

    from spec_vllm_compat.worker import capture

    worker = getattr(worker, "worker", worker)  # vLLM hands over a wrapper

    def synchronise() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = vars(worker).setdefault("guard_seconds", {"checks": 0.0, "prefill": 0.0, "steps": 0})
    if not hasattr(worker, "guard_originals"):
        worker.guard_originals = (capture.row_peaks, capture.Capture._input, type(worker).execute_model)
    row_peaks, inputs, execute_model = worker.guard_originals

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronise()
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronise()
                seconds[name] += time.perf_counter() - started

        return call

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        seconds["steps"] += 1
        return timed("prefill", execute_model)(self, *args, **kwargs)

    peaks, taken = {
        "on": (row_peaks, inputs),
        "timed": (timed("checks", row_peaks), timed("checks", inputs)),
        "off": (lambda rows: torch.zeros(rows.shape[:-1], device=rows.device), lambda _capture, _name: None),
    }[mode]
    capture.row_peaks, capture.Capture._input = peaks, taken
    type(worker).execute_model = execute if mode != "on" else execute_model
    result = dict(seconds)
    seconds.update(checks=0.0, prefill=0.0, steps=0)
    return result


class Driver:
    """The same in the driver."""

    def __init__(self, generator: Any) -> None:
        from spec_vllm_compat.driver.call import Call

        self.generator, self.call = generator, Call
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.originals = {name: vars(Call)[name] for name in DRIVER_CHECKS}

    def mode(self, mode: str) -> dict[str, float]:
        for name, original in self.originals.items():
            setattr(self.call, name, {"on": original, "timed": self._timed(name), "off": _nothing}[mode])
        worker = self.generator.executor.collective_rpc(_worker, args=(mode,))[0]
        result = {"driver": sum(self.seconds.values()), **worker}
        self.seconds.clear()
        return result

    def _timed(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return self.originals[name](*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return call


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; else a random Llama of the sizes below is made")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layer-ids", type=int, nargs="*", help="default: speculators' own four")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence")
    parser.add_argument("--calls", type=int, default=10, help="of each kind")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    import torch
    from speculators.data_generation import VllmHiddenStatesGenerator

    import spec_vllm_compat

    with tempfile.TemporaryDirectory() as folder:
        path = options.model or random_model.build(
            Path(folder),
            layers=options.layers,
            hidden=options.hidden,
            intermediate=options.intermediate,
            heads=options.heads,
            kv_heads=options.kv_heads,
            vocabulary=options.vocabulary,
        )
        generator = VllmHiddenStatesGenerator(
            str(path),
            layer_ids=options.layer_ids,
            max_model_len=options.tokens + 1,
            tensor_parallel_size=options.tensor_parallel_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
    rng, vocabulary = random.Random(0), generator.vllm_config.model_config.get_vocab_size()
    batches = [
        [[rng.randrange(3, vocabulary) for _ in range(options.tokens)] for _ in range(options.sequences)]
        for _ in range(options.calls)
    ]
    driver = Driver(generator)
    generator.generate(batches[0])
    generator.generate(batches[0])

    driver.mode("timed")
    started = time.perf_counter()
    for batch in batches:
        generator.generate(batch)
    total = time.perf_counter() - started
    times = driver.mode("on")

    taken: dict[str, list[float]] = {"on": [], "off": []}
    for batch in batches:
        for mode, times_taken in taken.items():
            driver.mode(mode)
            started = time.perf_counter()
            generator.generate(batch)
            times_taken.append(time.perf_counter() - started)
    driver.mode("on")
    with_checks, without = (statistics.median(taken[mode]) for mode in ("on", "off"))
    checks = times["driver"] + times["checks"]
    config = generator.vllm_config.model_config.hf_text_config
    generator.executor.shutdown()
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": [str(version) for version in spec_vllm_compat.report().versions],
        "model": f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}",
        "layer_ids": list(generator.layer_ids),
        "call": f"{options.sequences} sequences of {options.tokens} tokens",
        "calls": options.calls,
        "steps": times["steps"],
        "seconds_in_generate": round(total, 4),
        "seconds_in_prefill": round(times["prefill"], 4),
        "seconds_in_worker_checks": round(times["checks"], 5),
        "seconds_in_driver_checks": round(times["driver"], 5),
        "percent_of_prefill_added_up": round(100 * checks / times["prefill"], 3),
        "median_call_with_checks": round(with_checks, 5),
        "median_call_without": round(without, 5),
        "percent_of_prefill_with_and_without": round(
            100 * (with_checks - without) / (times["prefill"] / options.calls), 3
        ),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
