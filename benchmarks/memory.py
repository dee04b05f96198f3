#!/usr/bin/env python3
"""Memory of driver and worker over many calls of `generate()`, and the request states that stay in the worker.

    python benchmarks/memory.py --calls 1000 --out docs/memory.json --plot docs/memory.svg

Each call extracts four new sequences of random length. Every 20 calls: resident memory of both processes, request
states known to the worker's model runner, requests in the driver's scheduler, free blocks of the KV cache. Needs psutil
and, for the plot, matplotlib. `--plot-only` draws an existing file again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import random_model

MIB = 2**20
WARM = 100  # calls after which nothing may grow: allocator pools and lazily imported modules are there by then


def _worker_state(worker: Any) -> tuple[int, int, int]:
    """Process id, resident bytes and known requests of a worker."""
    import gc
    import os

    import psutil

    gc.collect()
    runner = worker.model_runner
    known = {*runner.requests, *runner.input_batch.req_id_to_index}
    return os.getpid(), psutil.Process().memory_info().rss, len(known)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import gc

    import psutil
    from speculators.data_generation import VllmHiddenStatesGenerator

    import spec_vllm_compat

    calls, every, longest = options.calls, options.every, options.longest
    with tempfile.TemporaryDirectory() as folder:
        generator = VllmHiddenStatesGenerator(
            str(random_model.build(Path(folder))),
            layer_ids=[1, 3, 4],
            max_model_len=longest + 1,
            gpu_memory_utilization=options.gpu_memory_utilization,
        )
    rng, samples, tokens = random.Random(0), [], 0
    started = time.perf_counter()
    for number in range(calls + 1):
        if number % every == 0:
            gc.collect()
            ((_, resident, known),) = generator.executor.collective_rpc(_worker_state)
            samples.append(
                {
                    "calls": number,
                    "driver_mib": round(psutil.Process().memory_info().rss / MIB, 2),
                    "worker_mib": round(resident / MIB, 2),
                    "requests_in_worker": known,
                    "requests_in_scheduler": len(generator.scheduler.requests),
                    "free_blocks": generator.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                }
            )
        if number < calls:
            shape = random.Random(number % options.shapes)
            lengths = [shape.randrange(1, longest + 1) for _ in range(4)]
            generator.generate([[rng.randrange(3, 512) for _ in range(length)] for length in lengths])
            tokens += sum(lengths)
    seconds = time.perf_counter() - started
    generator.executor.shutdown()
    return {
        "versions": [str(version) for version in spec_vllm_compat.report().versions],
        "kv_cache_blocks": generator.scheduler.kv_cache_config.num_blocks,
        "calls": calls,
        "sequences": 4 * calls,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        **summary(samples),
        "samples": samples,
    }


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth after the warm-up, as the slope of a straight line through the samples."""
    warm = [sample for sample in samples if sample["calls"] >= WARM]
    result: dict[str, Any] = {}
    for process in ("driver", "worker"):
        x = [sample["calls"] for sample in warm]
        y = [sample[f"{process}_mib"] for sample in warm]
        middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
        slope /= sum((a - middle_x) ** 2 for a in x)
        result[f"{process}_kib_per_call"] = round(slope * 1024, 3)
        result[f"{process}_mib_first_to_last"] = [y[0], y[-1]]
    result["most_requests_in_worker"] = max(sample["requests_in_worker"] for sample in samples)
    return result


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none"})
    from matplotlib import pyplot

    samples = result["samples"]
    calls = [sample["calls"] for sample in samples]
    figure, (memory, requests) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=[3, 1], layout="constrained"
    )
    for process in ("driver", "worker"):
        memory.plot(calls, [sample[f"{process}_mib"] for sample in samples], marker=".", label=process)
    memory.set_ylim(0, 1.2 * max(sample[f"{process}_mib"] for sample in samples for process in ("driver", "worker")))
    memory.set_ylabel("resident memory, MiB")
    versions = ", ".join(version.split(" [")[0] for version in result["versions"])
    memory.set_title(f"{result['calls']} calls of 4 sequences: {versions}", fontsize=9)
    memory.legend()
    requests.plot(calls, [sample["requests_in_worker"] for sample in samples], marker=".", color="tab:red")
    requests.set_ylim(-1, 10)
    requests.set_ylabel("requests left\nin worker")
    requests.set_xlabel("calls of generate()")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--shapes", type=int, default=20, help="lengths repeat after this many calls; tokens never do")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest sequence")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.005,
        help="small: on CPU a block of the KV cache becomes resident at its first use, which would look like a leak",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is small; threads would wait for each other
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if options.plot_only:
        result = json.loads(options.out.read_text())
    else:
        result = measure(options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
