"""Tokens a second through `generate()`, against the same engine's prefill alone. Both sides alternate in one process.

    python benchmarks/throughput.py OUT.json [--shape llama-8b] [--sequences 64] [--length 2048] [--batch 8] [--rounds 3]
                                    [--layers 2 16 29 31] [--tp 1] [--save DIR]

Weights are random (`load_format="dummy"`), so only a configuration is needed. Sides:
    prefill   the same scheduler and executor without capture: vLLM's own execute_model and sample_tokens
    generate  speculators' generate() with spec_vllm_compat; results of a batch are dropped before the next one
    save      the same, every sample written by a pool of threads as the stock script does (with --save)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import spec_vllm_compat  # noqa: I001 - before speculators
import torch
from speculators.data_generation import vllm_hidden_states_generator as module

SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}


def checkpoint(shape: str, folder: Path) -> Path:
    """A configuration and a tokenizer; the weights are made up by vLLM."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, architectures=["LlamaForCausalLM"], dtype="bfloat16"
    )
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b", unk_token="a").save_pretrained(folder)
    return folder


def generator(folder: Path, layers: list[int], length: int, tp: int, utilization: float) -> Any:
    from vllm.config import LoadConfig

    module.LoadConfig = lambda **_keywords: LoadConfig(load_format="dummy")
    return module.VllmHiddenStatesGenerator(
        str(folder),
        layer_ids=layers,
        max_model_len=length + 1,
        gpu_memory_utilization=utilization,
        tensor_parallel_size=tp,
    )


def prefill(gen: Any, batch: list[list[int]]) -> None:
    """One batch through vLLM's own scheduler and executor."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.request import RequestStatus

    scheduler, executor = gen.scheduler, gen.executor
    for ids in batch:
        request = module.Request(
            request_id=f"bench-{time.monotonic_ns()}",
            prompt_token_ids=ids,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            eos_token_id=1,
            arrival_time=0.0,
        )
        Scheduler.add_request(scheduler, request)
    while True:
        output = Scheduler.schedule(scheduler)
        MultiprocExecutor.execute_model(executor, output)
        if not output.total_num_scheduled_tokens:
            return
        MultiprocExecutor.sample_tokens(executor, None)
        done = [r.request_id for r in scheduler.requests.values() if r.num_computed_tokens >= r.num_prompt_tokens]
        Scheduler.finish_requests(scheduler, done, RequestStatus.FINISHED_ABORTED)


def run(side: str, gen: Any, batches: list[list[list[int]]], folder: Path | None) -> float:
    begin = time.perf_counter()
    if side == "prefill":
        for batch in batches:
            prefill(gen, batch)
    elif side == "generate":
        for batch in batches:
            gen.generate(batch)
    else:
        assert folder is not None
        with ThreadPoolExecutor(8) as pool:
            for number, batch in enumerate(batches):
                for index, sample in enumerate(gen.generate(batch)):
                    pool.submit(torch.save, sample, folder / f"data_{number * len(batch) + index}.pt")
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16, 29, 31])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--utilization", type=float, default=0.8)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    rng = random.Random(0)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    sequences = [[rng.randrange(vocabulary) for _ in range(options.length)] for _ in range(options.sequences)]
    batches = [sequences[i : i + options.batch] for i in range(0, len(sequences), options.batch)]
    tokens = options.sequences * options.length
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        gen = generator(
            checkpoint(options.shape, Path(folder)), options.layers, options.length, options.tp, options.utilization
        )
        start = time.perf_counter() - begin
        sides = ["prefill", "generate", *(["save"] if options.save else [])]
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds + 1):  # the first round warms up
            for side in sides:
                took = run(side, gen, batches, options.save)
                if number:
                    seconds[side].append(took)
                print(f"round {number} {side}: {tokens / took:,.0f} tokens/s", flush=True)
    rates = {side: [tokens / took for took in times] for side, times in seconds.items()}
    ratios = {
        side: [ours / base for ours, base in zip(rates[side], rates["prefill"], strict=True)] for side in sides[1:]
    }
    report = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "versions": {v.module: v.text for v in spec_vllm_compat.report().versions},
        "bytes_a_token": SHAPES[options.shape]["hidden_size"] * 2 * len(options.layers),
        "start_seconds": start,
        "shared_memory": gen.executor.session.shared,
        "tokens_per_second": {side: {"median": statistics.median(v), "all": v} for side, v in rates.items()},
        "ratio_to_prefill": {side: {"median": statistics.median(v), "all": v} for side, v in ratios.items()},
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"tokens_per_second": report["tokens_per_second"], "ratio": report["ratio_to_prefill"]}, indent=1))


if __name__ == "__main__":
    main()
