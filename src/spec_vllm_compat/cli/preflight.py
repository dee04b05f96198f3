"""``preflight``: will this model work here? A small copy of it goes through the real pipeline, in about a minute."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import counted, human
from spec_vllm_compat.cli.target import TargetModel, random_model, read_target, text_part

CACHE_MEMORY_FRACTION = 0.2  # speculators 0.3 and 0.4
DOES_NOT_FIT = ": it does NOT fit"
#: Words of errors whose cause vLLM has only logged, and what they mean.
SAID_ELSEWHERE = {
    "WorkerProc initialization failed": "a worker did not start",
    "check the stack trace": "a worker failed",
    "check the logs": "vLLM cannot make the model",
}

HELP = """Try MODEL (a folder, a config.json, or a hub id that is in the cache) before the long load.

Its configuration is made small, a few layers of small widths, with the architecture kept; the weights are random.
This copy goes through speculators' original entry point in this very environment: mixed and split batches, every row
(what one layer computed for one token) compared with Transformers. Where Transformers does not know the architecture, or
computes something else than this vLLM, with one-at-a-time extraction and with the log-probabilities of vLLM alone. A
quantised model is tried twice: without its quantisation, and with it.
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

    def attempt(quantized: bool) -> tuple[list[str], str | None]:
        what = "the full size" if full_config else "a small copy"
        how = f", {method} {'kept' if quantized else 'left out'}" if method else ""
        click.echo(f"trying {what} with random weights{how}", err=True)
        return _try(
            target, gpu_memory_utilization, full=full_config, quantized=quantized, tp_size=tp_size,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip

    lines, problem = attempt(full_config)
    if method and not full_config and not problem:
        more, problem = attempt(True)
        lines += [f"quantised  {method}: kept in a second copy", *more]
        problem = problem and f"without its quantisation it works; a small copy with {method}: {problem}"
    elif method:
        lines.append(f"quantised  {method}: {'kept' if full_config else 'left out, for the copy without it failed'}")
    memory = _memory(target, tp_size, gpu_memory_utilization, trust_remote_code)
    size = len(layers) * target.hidden_size * 2 + 16
    need, free = size * samples * mean_tokens, shutil.disk_usage(".").free
    lines += [
        f"output     {human(size)} a token for layers {layers}; {counted(samples, 'sample')} of "
        f"{counted(mean_tokens, 'token')}: {human(need)}; {human(free)} are free here{DOES_NOT_FIT if need > free else ''}",
        f"memory     {memory}",
        f"took       {time.monotonic() - started:.0f} s",
    ]
    answer = f"will NOT work here: {problem}" if problem else "works here"
    if not problem and memory.endswith(DOES_NOT_FIT):
        answer = "a small copy works here; the full size does NOT fit, see memory"
    click.echo("\n  ".join([f"{model}: {answer}", *lines]))
    if problem:
        click.echo("`spec-vllm-compat doctor` checks the environment; report this text with its output")
    else:
        click.echo("next: spec-vllm-compat extract --help")
    return 1 if problem else 0


def _try(target: TargetModel, memory: float, **how: Any) -> tuple[list[str], str | None]:
    """What was seen, and what stopped it. What vLLM says meanwhile is kept in a file where something stopped it."""
    trial = None
    handle, log = tempfile.mkstemp(prefix="preflight-", suffix=".log")
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        try:
            with _written_to(handle):
                from spec_vllm_compat.cli.trial import Trial

                trial = Trial(target, Path(scratch, "model"), **how)
                trial.run(memory)
        except Exception as error:  # noqa: BLE001 - whatever stops it is the answer
            text = str(error).strip().split("\n\n")[0]
            elsewhere = next((what for words, what in SAID_ELSEWHERE.items() if words in text), None)
            text = f"{elsewhere}: {_last_error(Path(log))}" if elsewhere else f"{type(error).__name__}: {text:.700}"
            if "does not recognize this architecture" in text or "preprocessor_config.json" in text:
                text += "\n  MODEL must be the model's folder, with its own code and processors; its config.json is not enough"
            return trial.lines if trial else [], f"{text}\n  what vLLM said is in {log}"
    os.unlink(log)
    return trial.lines, None


@contextmanager
def _written_to(handle: int) -> Iterator[None]:
    """What this process and its children print goes to an open file, which is closed."""
    saved = {number: os.dup(number) for number in (1, 2)}

    def redirect(to: dict[int, int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, target in to.items():
            os.dup2(target, number)

    redirect({1: handle, 2: handle})
    try:
        yield
    finally:
        redirect(saved)
        for descriptor in (handle, *saved.values()):
            os.close(descriptor)


def _last_error(log: Path) -> str:
    """The last error that a worker logged and where it was raised, without what vLLM puts before each line."""
    said = log.read_text(encoding="utf-8", errors="replace")
    errors = list(re.finditer(r"\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)", said))
    if not errors:
        return "no error of it was seen"
    places = re.findall(r'\]\s+File "(?:.*site-packages/)?(.*)", line (\d+), in (.*)', said[: errors[-1].start()])
    place = " ({}:{}, {})".format(*places[-1]) if places else ""
    return f"{errors[-1][1]:.700}{place}"


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
        click.echo("vLLM's CPU platform has no MLA attention: VLLM_MLA_DISABLE=1 for this trial", err=True)


def _memory(target: TargetModel, tp_size: int, utilization: float, trust_remote_code: bool) -> str:
    """Weights of the full model against what a device has, and what is left for the KV cache."""
    import psutil
    import torch

    weights, source = _weights(target, trust_remote_code)
    if torch.cuda.is_available():
        devices = range(min(tp_size, torch.cuda.device_count()))
        free, total = min(torch.cuda.mem_get_info(device) for device in devices)
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    device = f"a device has {human(free)} of {human(total)} free"
    if weights is None:
        return f"{source}; {device}"
    share = weights / tp_size
    text = f"weights {human(weights)} ({source}), {human(share)} a device with --tp-size {tp_size}; {device}"
    if share >= free:
        return text + DOES_NOT_FIT
    cache, token = (free - share) * utilization * CACHE_MEMORY_FRACTION, _kv_bytes(target, tp_size)
    return f"{text}; speculators makes {human(cache)} of what is left a KV cache, {cache / token:,.0f} tokens of {human(token)}"


def _kv_bytes(target: TargetModel, tp_size: int) -> float:
    """Bytes of KV cache a token and device in bfloat16, as if every layer had full attention."""
    text = text_part(target.config)
    heads = text["num_attention_heads"]
    if "kv_lora_rank" not in text:
        shared = text.get("num_key_value_heads") or heads
        width = 2 * max(1, shared // tp_size) * (text.get("head_dim") or target.hidden_size // heads)
    elif os.environ.get("VLLM_MLA_DISABLE", "0") == "1":
        width = 2 * max(1, heads // tp_size) * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    else:
        width = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    return float(2 * width * target.num_layers)


def _weights(target: TargetModel, trust_remote_code: bool) -> tuple[float | None, str]:
    """Bytes of the full model's weights, and how that is known."""
    import torch

    if files := [file.stat().st_size for file in target.folder.glob("*.safetensors")] if target.folder else []:
        return float(sum(files)), "size of its files"
    try:
        with torch.device("meta"):
            architecture = target.config["architectures"][0]
            model = random_model(target.path, architecture, trust_remote_code=trust_remote_code)
    except Exception:  # noqa: BLE001 - an estimate is not worth a failure
        return None, "weights unknown: no files, and Transformers cannot count them"
    note = ", before quantisation" if _quantisation(target) else ""
    return model.num_parameters() * 2.0, f"counted by Transformers, 2 bytes each{note}"
