#!/usr/bin/env python3
"""Does a head that was trained on extracted rows draft well in vLLM, and with which layer ids?

    python benchmarks/serving.py MODEL ROWS --out serving.json \\
        "no head" "layers of training=WORK/head/2:3,16,28" "vLLM's default=WORK/head/2"

ROWS are the held-out rows of benchmarks/training.py (WORK/rows-held_out), which also leaves the heads: WORK/head-.../EPOCH.
Their tokens up to each answer are the prompts, so that tokenizers cannot differ: Transformers 5.19 drops the line breaks of
this model's chat template, and a head that was trained with them drafts badly without. With layer ids after the colon a copy
of the head says `eagle_aux_hidden_state_layer_ids`; without, it is served as the trainer left it, which names none. vLLM's
own counters give the acceptance. If "no head" was run into the same file before, answers are compared with it: drafting must
not change what is said, but for rounding.

Needs a vLLM that drafts on the device at hand. On CPU 0.16.0 does not (`CPUModelRunner` asserts "spec decode is not
supported."); 0.20.2 loads the head, never asks the model for the states that it needs, and ends with "too many values to
unpack (expected 2)"; 0.28.0 does. speculators is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

ANSWER = 64  # tokens
DRAFTED = 2  # tokens a step, as many as the head was trained for


def serve(model: str, head: Path | None, layer_ids: list[int] | None, prompts: list[list[int]]) -> dict[str, Any]:
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {}
        if head is not None:
            copy = Path(folder, "head")
            shutil.copytree(head, copy, ignore=shutil.ignore_patterns("*.pt"))
            config = json.loads((copy / "config.json").read_text())
            if layer_ids:
                config["eagle_aux_hidden_state_layer_ids"] = layer_ids
            (copy / "config.json").write_text(json.dumps(config))
            more["speculative_config"] = {"model": str(copy), "method": "eagle3", "num_speculative_tokens": DRAFTED}
        more |= {"max_num_seqs": 32, "max_model_len": 1024, "block_size": 32}
        llm = vllm.LLM(model, seed=0, enforce_eager=True, disable_log_stats=False, **more)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=ANSWER)
        begin = time.perf_counter()
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        answers = [list(out.outputs[0].token_ids) for out in llm.generate(requests, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - begin
        counters: dict[str, Any] = {}
        for metric in llm.get_metrics():
            if "spec_decode" in metric.name:
                counters[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
        del llm
    return {"vllm": vllm.__version__, "answers": answers, "seconds": round(seconds, 2), "counters": counters}


def prompts_of(rows: Path) -> list[list[int]]:
    """Everything before each assistant turn of each sample: the loss mask begins with it."""
    import torch

    prompts = []
    for path in sorted(rows.rglob("data_*.pt"), key=lambda path: int(path.stem[5:])):
        sample = torch.load(path, weights_only=True, mmap=True)
        mask, ids = sample["loss_mask"].tolist(), sample["input_ids"].tolist()
        prompts += [ids[:place] for place in range(1, len(ids)) if mask[place] and not mask[place - 1]]
    return prompts


def summary(counters: dict[str, Any]) -> dict[str, Any]:
    drafts = counters["vllm:spec_decode_num_drafts"]
    by_place = counters["vllm:spec_decode_num_accepted_tokens_per_pos"][:DRAFTED]
    return {
        "drafts": drafts,
        "accepted_of_drafted": round(
            counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_draft_tokens"], 4
        ),
        "accepted_by_place": [round(count / drafts, 4) for count in by_place],
        "tokens_a_step": round(1 + counters["vllm:spec_decode_num_accepted_tokens"] / drafts, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("served", nargs="+", metavar="NAME[=HEAD[:K,K,K]]")
    parser.add_argument("--count", type=int, default=120, help="prompts to answer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    prompts = prompts_of(options.rows)[: options.count]
    for spec in options.served:
        name, _, place = spec.partition("=")
        head, _, ids = place.partition(":")
        layer_ids = [int(layer) for layer in ids.split(",")] if ids else None
        found = serve(options.model, Path(head) if head else None, layer_ids, prompts)
        whole = json.loads(options.out.read_text()) if options.out.exists() else {}
        counters, answers = found.pop("counters"), found.pop("answers")
        entry = {"layer_ids": layer_ids, "prompts": len(prompts), **found}
        if head:
            entry |= summary(counters)
        else:
            entry["answers"] = answers
        plain = whole.get("no head", {}).get("answers", [])
        if head and len(plain) == len(answers):
            entry["answers_as_without_a_head"] = sum(a == b for a, b in zip(answers, plain, strict=True))
        whole[name] = entry
        options.out.write_text(json.dumps(whole) + "\n")
        print(name, json.dumps(entry)[:400], flush=True)


if __name__ == "__main__":
    main()
