"""``preflight``: will this model work here? A small copy of it goes through the real pipeline, in about a minute."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import human
from spec_vllm_compat.cli.shrink import VOCABULARY, shrink
from spec_vllm_compat.cli.target import read_config, read_target, text_part
from spec_vllm_compat.errors import CompatError

STEP = 512  # tokens a scheduler step; with speculators' 8192 the split batch would take a CPU minutes
#: Two batches: lengths mixed in one step, and more tokens than a step takes, so that prompts are split.
BATCHES = ((1, 90, 7, 120, 33, 2, 64, 15, 5, 48, 21, 3), (500, 480, 511, 300, 390))

HELP = """Try MODEL (a folder, a config.json, or a hub id that is in the cache) before the long load.

Its configuration is made small, a few layers of small widths, with the architecture kept; the weights are random.
This copy goes through speculators' original entry point in this very environment: mixed and split batches, every row
compared with Transformers, or with one-at-a-time extraction where Transformers does not know the architecture.
Not tried: the weights' own format, quantisation, and whether the full model fits (its memory is estimated).

--full-config keeps the full size, with dummy weights, for those who have the memory.
"""


@click.command("preflight", help=HELP, short_help="Try a small copy of a model.", cls=ManyValues)
@click.argument("model", metavar="MODEL")
@layer_ids_option("Layers that you will extract. Default: speculators' choice.")
@click.option("--samples", default=100_000, show_default=True, help="Number of samples that you will extract.")
@click.option("--mean-tokens", default=1000, show_default=True, help="Their mean length.")
@click.option("--tp-size", default=1, show_default=True, type=click.IntRange(1), help="GPUs that will share the model.")
@click.option("--gpu-memory-utilization", default=0.8, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--full-config", is_flag=True, help="Do not make it small; dummy weights.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the small model in this folder.")
def command(
    model: str,
    layer_ids: tuple[int, ...],
    samples: int,
    mean_tokens: int,
    tp_size: int,
    gpu_memory_utilization: float,
    full_config: bool,
    keep: Path | None,
) -> int:
    started = time.monotonic()
    target = read_target(model)
    layers = target.layer_ids(layer_ids)
    config, folder = read_config(model)
    _settle_environment(config)
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        place = keep or Path(scratch, "model")
        place.mkdir(parents=True, exist_ok=True)
        try:
            trial = Trial(config, folder, place, full=full_config)
            trial.run(tp_size, gpu_memory_utilization)
            verdict, status = "works here", 0
        except Exception as error:  # noqa: BLE001 - whatever stops it is the answer
            text = str(error).strip().split("\n\n")[0]
            verdict, status = f"will NOT work here: {type(error).__name__}: {text:.700}", 1
            if "WorkerProc initialization failed" in text:
                verdict += "\n  the worker's own error stands above"
            if "does not recognize this architecture" in text:
                verdict += "\n  MODEL must be the folder with the model's own code; its config.json is not enough"
    size = len(layers) * target.hidden_size * 2 + 16
    click.echo(f"\n{model}: {verdict}")
    for line in trial.lines if status == 0 else []:
        click.echo(f"  {line}")
    disk = f"{human(size * samples * mean_tokens)}; {human(shutil.disk_usage('.').free)} are free here"
    click.echo(
        f"  output     {human(size)} a token for layers {layers}; {samples:,} samples of {mean_tokens:,} tokens: {disk}"
    )
    click.echo(f"  memory     {_memory(config, folder, model, tp_size)}")
    click.echo(f"  took       {time.monotonic() - started:.0f} s")
    if status == 0:
        click.echo("next: spec-vllm-compat extract --help")
    else:
        click.echo("`spec-vllm-compat doctor` checks the environment; report this text with its output")
    return status


def _settle_environment(config: dict[str, Any]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if "kv_lora_rank" in text_part(config) and "VLLM_MLA_DISABLE" not in os.environ:
        os.environ["VLLM_MLA_DISABLE"] = "1"
        click.echo("vLLM's CPU platform has no MLA attention: VLLM_MLA_DISABLE=1 for this trial")


class Trial:
    """One small model and its way through the pipeline. :attr:`lines` says what was seen."""

    def __init__(self, config: dict[str, Any], folder: Path | None, place: Path, *, full: bool) -> None:
        self.place, self.full = place, full
        self.lines: list[str] = []
        own_tokenizer = folder is not None and (folder / "tokenizer_config.json").exists()
        self.config = config if full else shrink(config, keep_vocabulary=own_tokenizer)
        quantized = text_part(self.config).pop("quantization_config", None)
        quantized = self.config.pop("quantization_config", None) or quantized
        if quantized:
            self.lines.append(f"quantisation ({quantized.get('quant_method', '?')}) was left out of the trial")
        text_part(self.config)["dtype"] = self.config["dtype"] = "bfloat16"
        (place / "config.json").write_text(json.dumps(self.config, indent=1))
        if own_tokenizer:
            for file in folder.iterdir():  # type: ignore[union-attr]
                wanted = file.suffix in (".json", ".txt", ".model", ".jinja", ".py") and "index" not in file.name
                if wanted and file.name != "config.json":
                    shutil.copy(file, place)
        else:
            _tokenizer(place, text_part(self.config)["vocab_size"])
        self.known = not full and self._random_weights()

    def _random_weights(self) -> bool:
        """Whether Transformers knows the architecture; then the copy has real (random) weights."""
        import torch
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(self.place)
            name = self.config["architectures"][0]
            cls = getattr(transformers, name, None)
            torch.manual_seed(11)
            model = cls(config) if cls is not None else transformers.AutoModelForCausalLM.from_config(config)
            model.to(torch.bfloat16).save_pretrained(self.place)
        except (ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
            why = str(error).splitlines()[0]
            self.lines.append(f"Transformers does not know the architecture ({why:.80}); dummy weights")
            return False
        written = json.loads((self.place / "config.json").read_text())
        if written.get("architectures") != self.config["architectures"]:
            raise CompatError(f"expected architecture {self.config['architectures']}; Transformers made "
                              f"{written.get('architectures')} of it")  # fmt: skip
        return True

    def run(self, tp_size: int, gpu_memory_utilization: float) -> None:
        """Construct, generate, compare."""
        import spec_vllm_compat  # noqa: F401, I001 - before speculators
        from speculators.data_generation import vllm_hidden_states_generator as module

        text = text_part(self.config)
        count = text["num_hidden_layers"]
        layers = list(range(count)) if not self.full else sorted({0, count // 2, count - 1})
        with _trial_settings(module, dummy_weights=not self.known):
            generator = module.VllmHiddenStatesGenerator(
                str(self.place), layer_ids=layers, max_model_len=STEP,
                gpu_memory_utilization=gpu_memory_utilization if self.full else min(gpu_memory_utilization, 0.3),
                tensor_parallel_size=tp_size,
            )  # fmt: skip
        try:
            rng = random.Random(1)
            batches = [
                [
                    [rng.randrange(3, min(text["vocab_size"], VOCABULARY) - 32) for _ in range(length)]
                    for length in lengths
                ]
                for lengths in BATCHES
            ]
            results = [generator.generate(batch) for batch in batches]
            session = generator.executor.session
            self.lines.append(
                f"hooks      {session.capturing.container}.K, K = {layers}; {self.config['architectures'][0]}"
            )
            if self.known:
                self._against_transformers(results, layers)
            else:
                self._against_single(generator, batches, results, layers)
        finally:
            generator.executor.shutdown()

    def _against_transformers(self, results: Sequence[Any], layers: list[int]) -> None:
        from spec_vllm_compat.cli.compare import TOLERANCE, compare

        found = compare(str(self.place), [sample for result in results for sample in result], layers, TOLERANCE)
        if found.wrong:
            raise CompatError(f"rows differ from Transformers: {found.wrong[0][1]}; {found.sentence}")
        self.lines.append(f"compared   with Transformers in float32: {found.sentence}")

    def _against_single(
        self, generator: Any, batches: Sequence[Any], results: Sequence[Any], layers: list[int]
    ) -> None:
        """Two runs of one engine: rounding depends on the batch, and so, in a few rows, does the choice of experts."""
        import torch

        from spec_vllm_compat.cli.compare import TOLERANCE, row_errors

        errors: list[torch.Tensor] = []
        for batch, result in zip(batches, results, strict=True):
            for ids, together in zip(batch, result, strict=True):
                (alone,) = generator.generate([ids])
                errors += map(row_errors, together["hidden_states"], alone["hidden_states"])
        every = torch.cat(errors)
        far = int((every > TOLERANCE).sum())
        text = f"{far} of {len(every):,} rows differ by more than {TOLERANCE}, the worst by {float(every.max()):.2g}"
        if far > len(every) // 10:
            raise CompatError(f"rows in a batch are not those of the sequence alone: {text} (layers {layers})")
        self.lines.append(f"compared   batches with one sequence at a time: {text}")


def _tokenizer(place: Path, size: int) -> None:
    """Some tokenizer: speculators loads one and asks it for nothing but its end token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(min(size, VOCABULARY))}, unk_token="t2"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t1", unk_token="t2"
    ).save_pretrained(place)


@contextmanager
def _trial_settings(module: Any, *, dummy_weights: bool) -> Iterator[None]:
    """Small steps; and weights that vLLM makes up, where none could be written: speculators builds ``LoadConfig()``."""
    step, load = module.MIN_MAX_BATCHED_TOKENS, module.LoadConfig
    module.MIN_MAX_BATCHED_TOKENS = STEP
    if dummy_weights:
        module.LoadConfig = lambda: load(load_format="dummy")
    try:
        yield
    finally:
        module.MIN_MAX_BATCHED_TOKENS, module.LoadConfig = step, load


def _memory(config: dict[str, Any], folder: Path | None, model: str, tp_size: int) -> str:
    """Weights of the full model against what a device has."""
    import torch

    files = [file.stat().st_size for file in folder.glob("*.safetensors")] if folder else []
    if files:
        weights, source = float(sum(files)), "size of its files"
    else:
        try:
            import transformers

            loaded = transformers.AutoConfig.from_pretrained(model)
            cls = getattr(transformers, config["architectures"][0])
            with torch.device("meta"):
                weights = sum(p.numel() for p in cls(loaded).parameters()) * 2.0
            source = "counted by Transformers, 2 bytes each"
        except Exception:  # noqa: BLE001 - an estimate is not worth a failure
            return "unknown: no weight files, and Transformers does not know the architecture"
    text = f"weights {human(weights)} ({source}), {human(weights / tp_size)} a device with --tp-size {tp_size}"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"{text}; a device has {human(total)}, {human(free)} free"
    return text
