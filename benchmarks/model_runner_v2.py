"""Model runner V2 on a GPU: its rows against model runner V1 and Transformers, in float32.

    python benchmarks/model_runner_v2.py OUT.json [--tp 2]

A small, seeded, random Llama. Batches of mixed lengths, prompts that go over several steps, more sequences than one step takes,
shared prefixes, and many calls on one generator, after which no request may be left in the worker. Every rank must say
itself that it runs V2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import spec_vllm_compat  # noqa: I001 - before speculators
import torch
from tensor_parallel import BOUND, LAYERS, batch, build, checkpoint, worst

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = 60


def batches() -> dict[str, list[list[int]]]:
    prefix = batch(700)[0]
    return {
        "one token": batch(1),
        "mixed lengths, longest first": batch(2000, 900, 300, 77, 16, 15, 2, 1),
        "prompts over steps": batch(3000, 17, 3900, 1, 256, 3999, 120, 4000, 4000, 5),
        "80 sequences": batch(*[3 + i * 37 % 80 for i in range(80)]),
        "shared prefix": [prefix + tail for tail in batch(5, 900, 1, 64)] + [prefix],
    }


@torch.no_grad()
def rows_of_transformers(path: Path, prompts: list[list[int]]) -> list[dict]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).model
    kept: dict[int, torch.Tensor] = {}
    for layer in LAYERS:
        model.layers[layer].register_forward_hook(
            lambda _m, _a, out, layer=layer: kept.update({layer: (out[0] if isinstance(out, tuple) else out).cpu()})
        )
    results = []
    for prompt in prompts:
        model(torch.tensor([prompt], device=DEVICE), use_cache=False)
        rows = {layer: kept[layer].reshape(len(prompt), -1) for layer in LAYERS}
        results.append({"hidden_states": [rows[layer] for layer in LAYERS]})
    return results


def state(worker: Any) -> dict[str, Any]:
    """What this rank runs, and how many requests it still knows."""
    runner = worker.model_runner
    requests = runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests
    return {
        "class": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "device": str(runner.device),
        "requests": len(requests),
        "free_slots": len(runner.req_states.free_indices) if hasattr(runner, "req_states") else None,
        "slots": getattr(runner, "max_num_reqs", None),
    }


def watch(worker: Any) -> None:
    """Note the number of sequences and tokens of each step."""
    runner = worker.model_runner
    original = runner.execute_model
    runner.steps_seen = []

    def execute_model(scheduler_output: Any, *args: Any, **keywords: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        runner.steps_seen.append((len(scheduled), scheduler_output.total_num_scheduled_tokens))
        return original(scheduler_output, *args, **keywords)

    runner.execute_model = execute_model


def steps(worker: Any) -> list[tuple[int, int]]:
    seen = worker.model_runner.steps_seen
    worker.model_runner.steps_seen = []
    return seen


def fail_once(worker: Any) -> None:
    """Let the second step from now fail after its forward pass, with its state pending."""
    runner = worker.model_runner
    original = runner.execute_model
    count = 0

    def execute_model(*args: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        result = original(*args, **keywords)
        if count == 2:
            runner.execute_model = original
            raise RuntimeError("failed on purpose")
        return result

    runner.execute_model = execute_model


def one_runner(path: Path, runner: str, tp: int, report: dict[str, Any]) -> dict[str, list[dict]]:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    begin = time.monotonic()
    generator = build(path, tp)
    report["seconds_to_start"] = round(time.monotonic() - begin, 1)
    try:
        identities = generator.executor.session.ask(generator.executor, "identify")
        report["model_runners"] = [identity.model_runner for identity in identities]
        report["before"] = generator.executor.collective_rpc(state)
        generator.executor.collective_rpc(watch)
        results, report["steps"] = {}, {}
        for name, prompts in batches().items():
            results[name] = generator.generate(prompts)
            report["steps"][name] = [s for s in generator.executor.collective_rpc(steps)[0] if s[0]]
        generator.executor.collective_rpc(fail_once)
        long = batches()["prompts over steps"]
        try:
            generator.generate(long)
            report["failed_call"] = "no error"
        except spec_vllm_compat.CompatError as error:
            report["failed_call"] = f"{type(error).__name__}: {error}"[:120]
        report["worst_row_error_after_failed_call"] = worst(generator.generate(long), results["prompts over steps"])
        small = batch(40, 3, 200, 9, 1, 77, 12, 130)
        first = generator.generate(small)
        again = 0.0
        for call in range(CALLS):  # the slots of finished requests are used again and again
            turn = call % len(small)
            got = generator.generate(small[turn:] + small[:turn])
            again = max(again, worst(got, first[turn:] + first[:turn]))
        report[f"worst_row_error_over_{CALLS}_calls"] = again
        report["after"] = generator.executor.collective_rpc(state)
        return results
    finally:
        generator.executor.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    runners = [("V1", 1), ("V2", 1)] + ([("V2", options.tp)] if options.tp > 1 else [])
    report: dict[str, Any] = {
        "versions": {v.module: v.text for v in spec_vllm_compat.report().versions},
        "device": torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu",
    }
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint("llama", Path(folder))
        for runner, tp in runners:
            key = f"{runner}, tp {tp}"
            report[key] = {}
            results[key] = one_runner(path, runner, tp, report[key])
            print(key, json.dumps(report[key]), flush=True)
        right = True
        for name, prompts in batches().items():
            want = rows_of_transformers(path, prompts)
            entry = report.setdefault("batches", {})[name] = {}
            for key, rows in results.items():
                entry[f"{key}, against Transformers"] = worst(rows[name], want)
                entry[f"{key}, against V1"] = worst(rows[name], results["V1, tp 1"][name])
            entry["another layer"] = worst(want, want, shift=1)
            right &= entry.pop("another layer") > 100 * BOUND and max(entry.values()) < BOUND
            print(name, json.dumps(entry), flush=True)
    for runner, tp in runners:
        said = report[f"{runner}, tp {tp}"]
        right &= "failed on purpose" in said["failed_call"] and said["worst_row_error_after_failed_call"] < BOUND
        right &= said["model_runners"] == [runner] * tp and said[f"worst_row_error_over_{CALLS}_calls"] < BOUND
        right &= all((".gpu.model_runner." in rank["class"]) == (runner == "V2") for rank in said["after"])
        right &= all(rank["requests"] == 0 for rank in said["after"])
    report["right"] = bool(right)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("right:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
