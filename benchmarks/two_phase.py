"""Ending a step without sampling, against `sample_tokens`: what the choice in the patch set two_phase is worth.

    python benchmarks/two_phase.py MODEL_PATH

Both ways alternate on one engine, call by call; short sequences, where sampling weighs most.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

from speculators.data_generation import VllmHiddenStatesGenerator

import spec_vllm_compat  # noqa: F401 - before speculators


def end_steps_by(_worker: Any, way: str) -> None:
    """In the worker: choose how steps are ended from now on."""
    from spec_vllm_compat.worker import capture

    original = vars(capture).setdefault("_benchmark_original", capture.finish_two_phase)
    capture.finish_two_phase = original if way == "clear" else (lambda w: w.sample_tokens(None))


def main() -> None:
    generator = VllmHiddenStatesGenerator(sys.argv[1], max_model_len=256)
    vocabulary = generator.vllm_config.model_config.get_vocab_size()
    rng = random.Random(0)
    batch = [[rng.randrange(3, vocabulary) for _ in range(24)] for _ in range(32)]
    seconds: dict[str, list[float]] = {"clear": [], "sample": []}
    for number in range(21):
        for way, taken in seconds.items():
            generator.executor.collective_rpc(end_steps_by, args=(way,))
            begin = time.perf_counter()
            generator.generate(batch)
            if number:  # the first round warms up
                taken.append(time.perf_counter() - begin)
    ratios = [sample / clear for clear, sample in zip(seconds["clear"], seconds["sample"], strict=True)]
    medians = {f"{way}_seconds_median": statistics.median(taken) for way, taken in seconds.items()}
    ratio = {"sample_over_clear_median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    print(json.dumps({"sequences": len(batch), "tokens": 24 * len(batch), **medians, **ratio}, indent=1))


if __name__ == "__main__":
    main()
