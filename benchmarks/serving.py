#!/usr/bin/env python3
"""Does a head that was trained on extracted rows draft well in vLLM, and with which layer ids?

    python benchmarks/serving.py MODEL HEAD QUESTIONS --out serving.json --name "right rows" [--layer-ids 3 16 28]

HEAD is a checkpoint of speculators' trainer (benchmarks/training.py leaves WORK/head-.../EPOCH), QUESTIONS the held-out
conversations of that script. Without --layer-ids the checkpoint is served as the trainer left it, which names no layers;
with them a copy of it says `eagle_aux_hidden_state_layer_ids`. vLLM's own counters give the acceptance. Every answer is
compared with what the same vLLM says without a head: drafting must not change what is said.

Needs a vLLM that drafts on the device at hand: on CPU 0.16.0 does not (`CPUModelRunner` asserts "spec decode is not
supported"), 0.20 and newer do. speculators is not needed. enforce_eager keeps the start short; 16 tokens a block is what
the CPU build of 0.16 wants here.
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

import conversations

ANSWER = 32  # tokens
DRAFTED = 2  # tokens a step, as many as the head was trained for


def serve(model: str, head: Path | None, layer_ids: list[int] | None, talks: list[Any]) -> dict[str, Any]:
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
        llm = vllm.LLM(
            model, max_model_len=1024, seed=0, enforce_eager=True, block_size=32, disable_log_stats=False, **more
        )
        sampling = vllm.SamplingParams(temperature=0, max_tokens=ANSWER)
        begin = time.perf_counter()
        answers = [list(out.outputs[0].token_ids) for out in llm.chat(talks, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - begin
        counters: dict[str, Any] = {}
        for metric in llm.get_metrics():
            if "spec_decode" in metric.name:
                counters[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    return {"vllm": vllm.__version__, "answers": answers, "seconds": round(seconds, 2), "counters": counters}


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
    parser.add_argument("head", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--layer-ids", type=int, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    talks = [talk[:1] for talk in conversations.read(options.questions)]
    whole = json.loads(options.out.read_text()) if options.out.exists() else {"served": {}}
    if "plain" not in whole:
        whole["plain"] = serve(options.model, None, None, talks)
    found = serve(options.model, options.head, options.layer_ids, talks)
    same = sum(a == b for a, b in zip(found.pop("answers"), whole["plain"]["answers"], strict=True))
    whole["served"][options.name] = {
        "layer_ids": options.layer_ids or "not named",
        "answers": len(talks),
        "answers_as_without_a_head": same,
        **summary(found.pop("counters")),
        **found,
    }
    options.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(options.name, json.dumps(whole["served"][options.name]))


if __name__ == "__main__":
    main()
