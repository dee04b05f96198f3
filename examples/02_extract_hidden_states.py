"""Step 2 of an EAGLE-3 pipeline as one plain script: tokens in, one data_N.pt a sample out.

    python 02_extract_hidden_states.py --model-path Qwen/Qwen3-8B --prepared-data tokenized.jsonl --output-dir hidden \
        --layer-ids 2 18 33 35 --batch-size 16 --max-seq-len 2048 --tp-size 1 --gpu-memory-utilization 0.8

Prepared data: a line a sample, {"input_ids": [...], "loss_mask": [...]}. Samples that are there already are left out, so
the script can be started again. `spec-vllm-compat extract` takes the same options and does more: it checks the data and
what is on disk, keeps a manifest, shares the work among jobs.
"""

import spec_vllm_compat  # noqa: F401, I001 - before speculators; nothing else is needed

import argparse
import json
import os
from pathlib import Path

import torch
from speculators.data_generation import VllmHiddenStatesGenerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--prepared-data", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--layer-ids", type=int, nargs="+", default=None)
    args = parser.parse_args()

    samples = [json.loads(line) for line in args.prepared_data.read_text().splitlines()]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    paths = [args.output_dir / f"data_{number}.pt" for number in range(len(samples))]
    left = [number for number, path in enumerate(paths) if not path.exists()]
    print(f"{len(left)} of {len(samples)} samples to do")

    generator = VllmHiddenStatesGenerator(
        model_path=args.model_path,
        layer_ids=args.layer_ids,
        max_model_len=args.max_seq_len + 1,  # speculators keeps one token fewer
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tp_size,
    )
    for begin in range(0, len(left), args.batch_size):
        numbers = left[begin : begin + args.batch_size]
        results = generator.generate([samples[number]["input_ids"] for number in numbers])
        for number, result in zip(numbers, results, strict=True):
            mask = torch.tensor(samples[number]["loss_mask"][: len(result["input_ids"])])
            part = paths[number].with_suffix(".part")  # whole or not there, whatever happens
            torch.save({**result, "loss_mask": mask}, part)
            os.replace(part, paths[number])
        print(f"{begin + len(numbers)} of {len(left)} done", flush=True)


if __name__ == "__main__":  # worker processes import this file
    main()
