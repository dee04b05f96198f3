"""Are the rows of vLLM's own `extract_hidden_states` those of generate()? One batch, both in this interpreter, one by one.

    python benchmarks/same_rows.py OUT.json [--model CHECKPOINT] [--layers 1 3 5] [--dtype float32]

vLLM is asked for the layers by its own numbers, one higher. Reported is the worst row (relative L2) of each sequence and
layer, against the same layer and against the nearest of all others; and both against Transformers in float32. Exit code 1:
some layer of vLLM's is nearer to another of ours. Without --model a random Llama of six blocks is made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import random_model

LENGTHS = (128, 97, 128, 40)


def vllm_rows(task: dict[str, Any]) -> dict[str, Any]:
    from sides import VllmExtract

    options = {"folder": None, "utilization": 0.3, "tp": 1, "dummy": False, "max_length": 256}
    side = VllmExtract(task["model"], {**options, "layers": task["layers"], "dtype": task["dtype"]}, capture=True)
    outputs = side.llm.generate([{"prompt_token_ids": ids} for ids in task["batch"]], side.sampling, use_tqdm=False)
    rows: dict[str, Any] = {}
    for number, (ids, output) in enumerate(zip(task["batch"], outputs, strict=True)):
        sample = side.load(output.kv_transfer_params["hidden_states_path"])
        side._check(sample, ids)
        for index, layer in enumerate(task["layers"]):
            rows[f"{number} {layer}"] = sample["hidden_states"][:, index].clone()
    shutil.rmtree(side.folder)
    return rows


def our_rows(task: dict[str, Any]) -> dict[str, Any]:
    import spec_vllm_compat  # noqa: F401, I001 - before speculators
    from speculators.data_generation import vllm_hidden_states_generator as module

    config = module.ModelConfig
    module.ModelConfig = lambda **keywords: config(**{**keywords, "dtype": task["dtype"]})
    layers = list(range(task["depth"]))
    generator = module.VllmHiddenStatesGenerator(
        task["model"], layer_ids=layers, max_model_len=256, gpu_memory_utilization=0.3, tensor_parallel_size=1
    )
    rows = {}
    for number, sample in enumerate(generator.generate(task["batch"])):
        for layer, states in zip(layers, sample["hidden_states"], strict=True):
            rows[f"{number} {layer}"] = states.clone()
    generator.executor.shutdown()
    return rows


def reference_rows(task: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the blocks themselves, so that the last one is before the final norm."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).model.eval()
    rows: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    for layer, block in enumerate(model.layers):
        block.register_forward_hook(
            lambda _block, _inputs, output, layer=layer: seen.__setitem__(
                layer, output[0] if isinstance(output, tuple) else output
            )
        )
    for number, ids in enumerate(task["batch"]):
        with torch.inference_mode():
            model(torch.tensor([ids]))
        rows |= {f"{number} {layer}": states.reshape(len(ids), -1).clone() for layer, states in seen.items()}
    return rows


PARTS = {"vllm": vllm_rows, "ours": our_rows, "transformers": reference_rows}


def part(name: str, task: dict[str, Any], out: str) -> None:
    from safetensors.torch import save_file

    save_file({key: rows.contiguous().cpu() for key, rows in PARTS[name](task).items()}, out)


def compare(task: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    def worst(one: Any, other: Any) -> float:
        one, other = one.float(), other.float()
        return float(f"{((one - other).norm(dim=-1) / other.norm(dim=-1)).max().item():.2e}")

    result = []
    for number, ids in enumerate(task["batch"]):
        for layer in task["layers"]:
            own = found["vllm"][f"{number} {layer}"]
            apart = {other: worst(own, found["ours"][f"{number} {other}"]) for other in range(task["depth"])}
            reference = found["transformers"][f"{number} {layer}"]
            result.append(
                {
                    "tokens": len(ids),
                    "layer": layer,
                    "vllm_id": layer + 1,
                    "apart": apart.pop(layer),
                    "nearest_other": min(apart.items(), key=lambda pair: pair[1]),
                    "vllm_from_float32": worst(own, reference),
                    "ours_from_float32": worst(found["ours"][f"{number} {layer}"], reference),
                }
            )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_model.build(Path(folder, "model"))
        config = json.loads((model / "config.json").read_text())
        rng = random.Random(0)
        batch = [[rng.randrange(3, config["vocab_size"]) for _ in range(length)] for length in LENGTHS]
        task = {"model": str(model), "layers": options.layers, "dtype": options.dtype, "batch": batch}
        task["depth"] = config["num_hidden_layers"]
        for name in PARTS:  # a process each: one engine at a time
            command = [sys.executable, __file__, "--part", name, json.dumps(task), f"{folder}/{name}.safetensors"]
            subprocess.run(command, check=True)
        from safetensors.torch import load_file

        rows = compare(task, {name: load_file(f"{folder}/{name}.safetensors") for name in PARTS})
    import torch
    import transformers
    import vllm

    versions = {module.__name__: module.__version__ for module in (vllm, torch, transformers)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = {"model": model.name, "dtype": options.dtype, "versions": versions, "device": device, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(row)
    return 1 if any(row["apart"] >= row["nearest_other"][1] for row in rows) else 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if sys.argv[1:2] == ["--part"]:
        part(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
