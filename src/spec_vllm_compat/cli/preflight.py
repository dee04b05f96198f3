"""``preflight``: will this model work here? A small copy of it goes through the real pipeline, in about a minute."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import click

from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import human
from spec_vllm_compat.cli.target import TargetModel, read_target, text_part

CACHE_MEMORY_FRACTION = 0.2  # speculators 0.3 and 0.4

HELP = """Try MODEL (a folder, a config.json, or a hub id that is in the cache) before the long load.

Its configuration is made small, a few layers of small widths, with the architecture kept; the weights are random.
This copy goes through speculators' original entry point in this very environment: mixed and split batches, every row
compared with Transformers. Where Transformers does not know the architecture, with one-at-a-time extraction and with the
log-probabilities of vLLM alone. A quantised model is tried twice: without its quantisation, and with it.
Not tried: the weights themselves, and whether the full model fits (its memory is estimated).

--full-config keeps the full size, with random weights, for those who have the memory; rows are compared with
one-at-a-time extraction.
"""


@click.command("preflight", help=HELP, short_help="Try a small copy of a model.", cls=ManyValues,
               context_settings={"show_default": True})  # fmt: skip
@click.argument("model", metavar="MODEL")
@layer_ids_option("Layers that you will extract. Default: speculators' choice.")
@click.option("--samples", default=100_000, help="Number of samples that you will extract.")
@click.option("--mean-tokens", default=1000, help="Their mean length.")
@click.option("--tp-size", default=1, type=click.IntRange(1), help="GPUs that will share the model.")
@click.option("--gpu-memory-utilization", default=0.8, type=click.FloatRange(0, 1, min_open=True))
@click.option("--full-config", is_flag=True, help="Do not make it small.")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the model's folder brings.")
def command(
    model: str, layer_ids: tuple[int, ...], samples: int, mean_tokens: int, tp_size: int, gpu_memory_utilization: float,
    full_config: bool, trust_remote_code: bool,
) -> int:  # fmt: skip
    started = time.monotonic()
    target = read_target(model, trust_remote_code=trust_remote_code)
    layers = target.layer_ids(layer_ids)
    _settle_environment(target)
    method = _quantisation(target)
    lines, problem = _try(
        target, tp_size, gpu_memory_utilization, full=full_config, quantized=full_config,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if method and not full_config and not problem:
        more, problem = _try(
            target, tp_size, gpu_memory_utilization, full=False, quantized=True, trust_remote_code=trust_remote_code
        )
        lines += [f"quantised  {method}: kept in a second copy", *more]
        problem = problem and f"without its quantisation it works; a small copy with {method}: {problem}"
    elif method:
        lines.append(f"quantised  {method}: {'kept' if full_config else 'left out, for the copy without it failed'}")
    click.echo(f"\n{model}: " + (f"will NOT work here: {problem}" if problem else "works here"))
    size = len(layers) * target.hidden_size * 2 + 16
    disk = f"{human(size * samples * mean_tokens)}; {human(shutil.disk_usage('.').free)} are free here"
    lines += [
        f"output     {human(size)} a token for layers {layers}; {samples:,} samples of {mean_tokens:,} tokens: {disk}",
        f"memory     {_memory(target, tp_size, gpu_memory_utilization)}",
        f"took       {time.monotonic() - started:.0f} s",
    ]
    for line in lines:
        click.echo(f"  {line}")
    if problem:
        click.echo("`spec-vllm-compat doctor` checks the environment; report this text with its output")
    else:
        click.echo("next: spec-vllm-compat extract --help")
    return 1 if problem else 0


def _try(target: TargetModel, tp_size: int, memory: float, **how: bool) -> tuple[list[str], str | None]:
    """What was seen, and what stopped it."""
    from spec_vllm_compat.cli.trial import Trial

    trial = None
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        try:
            trial = Trial(target, Path(scratch, "model"), **how)
            trial.run(tp_size, memory)
        except Exception as error:  # noqa: BLE001 - whatever stops it is the answer
            text = str(error).strip().split("\n\n")[0]
            problem = f"{type(error).__name__}: {text:.700}"
            if "WorkerProc initialization failed" in text:
                problem += "\n  the worker's own error stands above"
            if "does not recognize this architecture" in text:
                problem += "\n  MODEL must be the folder with the model's own code; its config.json is not enough"
            return trial.lines if trial else [], problem
    return trial.lines, None


def _quantisation(target: TargetModel) -> str:
    for part in (target.config, text_part(target.config)):
        if config := part.get("quantization_config"):
            return f"{config.get('quant_method', 'unknown method')} {config.get('format', '')}".strip()
    return ""


def _settle_environment(target: TargetModel) -> None:
    import torch

    if torch.cuda.is_available():
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if "kv_lora_rank" in text_part(target.config) and "VLLM_MLA_DISABLE" not in os.environ:
        os.environ["VLLM_MLA_DISABLE"] = "1"
        click.echo("vLLM's CPU platform has no MLA attention: VLLM_MLA_DISABLE=1 for this trial")


def _memory(target: TargetModel, tp_size: int, utilization: float) -> str:
    """Weights of the full model against what a device has, and what is left for the KV cache."""
    import psutil
    import torch

    weights, source = _weights(target)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    device = f"a device has {human(free)} of {human(total)} free"
    if weights is None:
        return f"{source}; {device}"
    text = (
        f"weights {human(weights)} ({source}), {human(weights / tp_size)} a device with --tp-size {tp_size}; {device}"
    )
    left = free - weights / tp_size
    if left <= 0:
        return f"{text}: it does NOT fit"
    cache, token = left * utilization * CACHE_MEMORY_FRACTION, _kv_bytes(target, tp_size)
    return f"{text}; speculators makes {human(cache)} of what is left a KV cache, {cache / token:,.0f} tokens of {human(token)}"


def _kv_bytes(target: TargetModel, tp_size: int) -> float:
    """Bytes of KV cache a token and device in bfloat16, as if every layer had full attention."""
    text = text_part(target.config)
    if "kv_lora_rank" in text:
        width = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = text["num_attention_heads"]
        shared = text.get("num_key_value_heads") or heads
        width = 2 * max(1, shared // tp_size) * (text.get("head_dim") or target.hidden_size // heads)
    return float(2 * width * target.num_layers)


def _weights(target: TargetModel) -> tuple[float | None, str]:
    """Bytes of the full model's weights, and how that is known."""
    import torch
    import transformers

    files = [file.stat().st_size for file in target.folder.glob("*.safetensors")] if target.folder else []
    if files:
        return float(sum(files)), "size of its files"
    try:
        config = transformers.AutoConfig.from_pretrained(target.path)
        with torch.device("meta"):
            count = sum(
                p.numel() for p in getattr(transformers, target.config["architectures"][0])(config).parameters()
            )
    except Exception:  # noqa: BLE001 - an estimate is not worth a failure
        return None, "weights unknown: no files, and Transformers does not know the architecture"
    note = ", before quantisation" if _quantisation(target) else ""
    return count * 2.0, f"counted by Transformers, 2 bytes each{note}"
