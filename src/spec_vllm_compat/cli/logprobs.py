"""vLLM's own prompt log-probabilities against those of the captured last layer, final norm and LM head on top.

The judge knows nothing of hidden states. ``python -m spec_vllm_compat.cli.logprobs`` is its process: vLLM alone, with
:mod:`weights`, and without any patch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOP = 20  # log-probabilities a position
FORMAT = "spec_vllm_compat_random"  # the load format of :mod:`weights`
NATS = 0.1  # mean difference that a row may have from rounding to bfloat16; that of another token is off by about one


def of_vllm(generator: Any, prompts: Sequence[list[int]], *, random_weights: bool) -> list[list[dict[int, float]]]:
    """Token id to log-probability, for every position but the first of each prompt, by a vLLM without us.

    It runs beside the generator, on the same checkpoint or on the same random weights of :mod:`weights`. RuntimeError where
    vLLM alone cannot run the model.
    """
    out = Path(generator.model_path, "logprobs.json")
    variables = {**os.environ, "SPEC_VLLM_COMPAT": "off", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    config = generator.vllm_config
    settings = {
        "model": generator.model_path,
        "load_format": FORMAT if random_weights else "auto",
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        # A setting of vLLM's own: operators that give wrong rows (patch set cpu_operators) are left out here too.
        "compilation_config": {"custom_ops": config.compilation_config.custom_ops},
    }
    asked = json.dumps({"settings": settings, "prompts": prompts, "out": str(out)})
    command = [sys.executable, "-m", "spec_vllm_compat.cli.logprobs"]
    done = subprocess.run(command, input=asked, env=variables, capture_output=True, text=True, timeout=900, check=False)
    if not out.exists():
        last = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"vLLM alone cannot run it: {last[-1].strip()}")
    return [[{int(k): v for k, v in row.items()} for row in rows] for rows in json.loads(out.read_text())]


def differences(generator: Any, rows: Any, judged: Sequence[dict[int, float]]) -> Any:
    """Mean difference in nats of each position of one prompt between ``judged``, of :func:`of_vllm`, and what follows from
    the ``rows`` that were captured from the last layer."""
    import torch

    tokens = torch.tensor([list(row)[:TOP] for row in judged])
    expected = torch.tensor([list(row.values())[:TOP] for row in judged])
    found = generator.executor.collective_rpc(_on_top, args=(rows, tokens))[0]
    return (found - expected).abs().mean(dim=-1)


def _on_top(worker: Any, rows: Any, tokens: Any) -> Any:
    """In the worker: vLLM's own final norm and LM head over captured rows."""
    import torch

    from spec_vllm_compat.worker.layers import find_decoder_layers

    runner = worker.model_runner
    model = runner.model
    name, _ = find_decoder_layers(model, runner.model_config.hf_text_config.num_hidden_layers)
    body = model.get_submodule(name.rpartition(".")[0])
    norms = [part for name, part in body.named_children() if "norm" in name or name == "ln_f"]
    if len(norms) != 1:
        raise RuntimeError(f"expected one final norm in {type(body).__name__}; found {len(norms)}")
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model.compute_logits(norms[0](rows.to(device)))
        if logits is None:  # gathered on the first rank alone
            return None
        return torch.log_softmax(logits.float(), dim=-1).gather(1, tokens.to(device)).cpu()


def _judge() -> None:
    from vllm import LLM, SamplingParams

    import spec_vllm_compat.cli.weights  # noqa: F401 - registers FORMAT
    from spec_vllm_compat.remote_code import trusted

    asked = json.load(sys.stdin)
    how = {"enforce_eager": True, "max_model_len": 1024, "max_logprobs": TOP, "trust_remote_code": trusted()}
    llm = LLM(**asked["settings"], **how)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
    rows = [[{k: v.logprob for k, v in row.items()} for row in o.prompt_logprobs[1:]] for o in outputs]
    Path(asked["out"]).write_text(json.dumps(rows))


if __name__ == "__main__":
    _judge()
    sys.stdout.flush()
    os._exit(0)  # this vLLM's own exit sometimes aborts
