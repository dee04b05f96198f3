"""Tensor parallel on real devices: rows of two ranks against one, a rank killed in the middle, memory by rank.

    python benchmarks/tensor_parallel.py OUT.json [--shapes llama qwen3_moe deepseek_v3] [--tp 2]

Models are small, seeded and random, saved as checkpoints in float32, so that the bound can be strict: ranks add partial sums
in another order than one rank does, which in float32 stays below 1e-4 of a row's norm (a wrong row or layer is above 0.1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_MLA_DISABLE", "1")

import spec_vllm_compat  # noqa: I001 - before speculators
import torch
from speculators.data_generation import vllm_hidden_states_generator as module

BOUND = 1e-4
LAYERS = [5, 0, 2, 7]
COMMON = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MOE = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {**MOE, "num_experts": 8, "head_dim": 64, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "deepseek_v3": {  # without MLA, which has no float32 (benchmarks/mla.py runs it)
        **MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 8,
    },
}


def checkpoint(family: str, folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**COMMON, **SHAPES[family]})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(COMMON["vocab_size"])}, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", unk_token="t2").save_pretrained(folder)
    return folder


def build(path: Path, tp: int) -> Any:
    original = module.ModelConfig
    module.ModelConfig = lambda **keywords: original(**{**keywords, "dtype": "float32"})
    try:
        return module.VllmHiddenStatesGenerator(
            str(path), layer_ids=LAYERS, max_model_len=4096, gpu_memory_utilization=0.3, tensor_parallel_size=tp
        )
    finally:
        module.ModelConfig = original


def batch(*lengths: int) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(3, COMMON["vocab_size"]) for _ in range(length)] for length in lengths]


def worst(results: list[dict], others: list[dict], shift: int = 0) -> float:
    error = 0.0
    for one, other in zip(results, others, strict=True):
        for index, got in enumerate(one["hidden_states"]):
            want = other["hidden_states"][(index + shift) % len(LAYERS)]
            error = max(error, float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    return error


def peak_bytes(_worker: Any) -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def copies(worker: Any) -> bool:
    """Whether this rank holds a buffer for rows."""
    return worker._spec_vllm_compat._buffer is not None


def compiled(_worker: Any) -> list[str]:
    """vLLM's compiled modules that this rank has loaded."""
    modules = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return sorted(name for name, file in modules.items() if name.startswith("vllm.") and file.endswith(".so"))


def one_family(family: str, tp: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(family, Path(folder))
        prompts = batch(3000, 17, 3900, 1, 256, 3999, 120)  # more than one step of 8,192 tokens
        single = build(path, 1)
        alone = single.generate(prompts)
        single.executor.shutdown()
        parallel = build(path, tp)  # the second generator of this process: CUDA is initialised in the driver by now
        together = parallel.generate(prompts)
        error, wrong = worst(together, alone), worst(together, alone, shift=1)
        identities = parallel.executor.session.ask(parallel.executor, "identify")
        report = {
            "worst_row_error": error,
            "error_of_another_layer": wrong,
            "right": error < BOUND < wrong,
            "ranks": [identity.tensor_parallel_rank for identity in identities],
            "model_runners": [identity.model_runner for identity in identities],  # vLLM's own choice
            "ranks_that_keep_rows": parallel.executor.collective_rpc(copies),
            "peak_bytes_by_rank": parallel.executor.collective_rpc(peak_bytes),
            "compiled": parallel.executor.collective_rpc(compiled)[0],
        }
        if family == "llama":
            report["killed_rank"] = kill_a_rank(parallel, path, tp, alone, prompts)
        parallel.executor.shutdown()
        return report


def kill_a_rank(generator: Any, path: Path, tp: int, alone: list[dict], prompts: list[list[int]]) -> dict[str, Any]:
    """SIGKILL the last rank in the middle of a call."""
    processes = [handle.proc for handle in generator.executor.workers]
    shared = set(os.listdir("/dev/shm"))
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(processes[-1].pid, signal.SIGKILL)

    timer = threading.Timer(0.15, kill)
    timer.start()
    long = batch(*[4000] * 24)
    said = ""
    calls = 0
    try:
        while True:
            generator.generate(long)
            calls += 1
    except Exception as error:  # noqa: BLE001 - any error will do, it is written down
        said = f"{type(error).__name__}: {error}"[:300]
    seconds = time.monotonic() - killed[0]
    try:
        generator.generate(long)
        again = "no error"
    except Exception as error:  # noqa: BLE001
        again = f"{type(error).__name__}: {error}"[:300]
    generator.executor.shutdown()
    alive = [process.pid for process in processes if process.is_alive()]
    fresh = build(path, tp)
    error = worst(fresh.generate(prompts), alone)
    fresh.executor.shutdown()
    return {
        "error_after_seconds": seconds,
        "error": said,
        "next_call": again,
        "complete_calls_before": calls,
        "processes_left": alive,
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shared),
        "new_generator_worst_row_error": error,
    }


def fork(tmp: Path, tp: int) -> str:
    """What `VLLM_WORKER_MULTIPROC_METHOD=fork` comes to: rows, or one sentence that says why not."""
    code = (
        "import spec_vllm_compat\n"
        "from speculators.data_generation import VllmHiddenStatesGenerator\n"
        f"generator = VllmHiddenStatesGenerator({str(tmp)!r}, layer_ids=[1], max_model_len=64, "
        f"gpu_memory_utilization=0.3, tensor_parallel_size={tp})\n"
        "print('rows of shape', tuple(generator.generate([[5, 6, 7]])[0]['hidden_states'][0].shape))\n"
        "generator.executor.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    rows = re.search(r"rows of shape \(.*?\)", done.stdout)
    if done.returncode == 0 and rows is not None:
        return rows[0]
    return done.stderr.strip().splitlines()[-1][:400]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama", "qwen3_moe", "deepseek_v3"])
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "versions": {v.module: v.text for v in spec_vllm_compat.report().versions},
        "tp": options.tp,
    }
    if torch.cuda.is_available():
        report["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        with tempfile.TemporaryDirectory() as folder:
            report["fork"] = fork(checkpoint("llama", Path(folder)), options.tp)
            print(report["fork"], flush=True)
    for family in options.shapes:
        begin = time.monotonic()
        try:
            report[family] = one_family(family, options.tp)
        except Exception as error:  # noqa: BLE001 - the other families still run; the report says what failed
            traceback.print_exc()
            report[family] = {"right": False, "failed": f"{type(error).__name__}: {error}"[-600:]}
        report[family]["seconds"] = round(time.monotonic() - begin, 1)
        print(family, json.dumps(report[family]), flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[family]["right"] for family in options.shapes) else 1


if __name__ == "__main__":
    sys.exit(main())
