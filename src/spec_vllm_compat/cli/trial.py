"""One small model and its way through speculators' original entry point."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from spec_vllm_compat.cli.progress import counted
from spec_vllm_compat.cli.shrink import VOCABULARY, shrink
from spec_vllm_compat.cli.target import TargetModel, random_model, text_part
from spec_vllm_compat.errors import CompatError

STEP = 512  # tokens a scheduler step; with speculators' 8192 the split batch would take a CPU minutes
#: Two batches: lengths mixed in one step, and more tokens than a step takes, so that prompts are split.
BATCHES = ((1, 90, 7, 120, 33, 2, 64, 15, 5, 48, 21, 3), (500, 480, 511, 300, 390))
ROUTED = ("num_experts", "n_routed_experts", "num_local_experts")


class Trial:
    """A model of random weights in ``place``, with ``target``'s size and quantisation or without. :attr:`lines` says
    what was seen."""

    def __init__(
        self, target: TargetModel, place: Path, *, full: bool, quantized: bool, trust_remote_code: bool, tp_size: int
    ):
        self.place, self.full, self.tp_size, self.lines = place, full, tp_size, list[str]()
        self.trust_remote_code = trust_remote_code
        folder = target.folder if target.folder and (target.folder / "tokenizer_config.json").exists() else None
        small = None if full else shrink(target.config, keep_vocabulary=folder is not None, tp_size=tp_size)
        self.config = small or deepcopy(target.config)
        self.quantized = False
        for part in (self.config, text_part(self.config)):
            part["dtype"] = part["torch_dtype"] = target.dtype  # the name before Transformers 4.56
            if not quantized:
                part.pop("quantization_config", None)
            elif method := part.get("quantization_config"):
                self.quantized = True
                if method.get("quant_method") == "gptq":  # else vLLM looks into the checkpoint, and there is none
                    method.setdefault("modules_in_block_to_quantize", ["proj"])
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(self.config, indent=1))
        for file in target.folder.iterdir() if target.folder else ():
            wanted = file.suffix in (".json", ".txt", ".model", ".jinja", ".py") and "index" not in file.name
            if file.suffix == ".py" or (folder and wanted and file.name != "config.json"):
                shutil.copy(file, place)
        if folder is None:
            _tokenizer(place, text_part(self.config)["vocab_size"])
        #: Whether Transformers can judge: it has written the weights.
        self.known = not full and not quantized and self._written_by_transformers()

    def _written_by_transformers(self) -> bool:
        import torch

        torch.manual_seed(11)
        try:
            name = self.config["architectures"][0]
            model = random_model(str(self.place), name, trust_remote_code=self.trust_remote_code)
            model.to(getattr(torch, self.config["dtype"])).save_pretrained(self.place)
        except (ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self.lines.append(f"weights    random, made in vLLM: Transformers cannot make them ({why:.80})")
            (self.place / "config.json").write_text(json.dumps(self.config, indent=1))
            return False
        return True

    def run(self, memory: float) -> None:
        """Construct, generate, compare. Raises what stops it."""
        from speculators.data_generation import vllm_hidden_states_generator as module

        from spec_vllm_compat.cli.logprobs import FORMAT
        from spec_vllm_compat.cli.weights import RandomWeights

        text = text_part(self.config)
        count = text["num_hidden_layers"]
        layers = sorted({0, count // 2, count - 1}) if self.full else list(range(count))
        draw = random.Random(1)
        top = min(text["vocab_size"], VOCABULARY) - 32
        batches = [[[draw.randrange(3, top) for _ in range(n)] for n in lengths] for lengths in BATCHES]
        settings: dict[str, Any] = {"MIN_MAX_BATCHED_TOKENS": STEP}
        if not self.known:  # no checkpoint, so our loader; speculators builds ``LoadConfig()``
            settings["LoadConfig"] = partial(RandomWeights, load_format=FORMAT)
        with patch.multiple(module, **settings):
            generator = module.VllmHiddenStatesGenerator(
                str(self.place), layer_ids=layers, max_model_len=STEP, tensor_parallel_size=self.tp_size,
                gpu_memory_utilization=memory if self.full else min(memory, 0.3),
            )  # fmt: skip
        try:
            generator.executor.collective_rpc(use_states)
            results = [sample for batch in batches for sample in generator.generate(batch)]
            container = generator.executor.session.capturing.container
            self.lines.append(f"hooks      {container}.K, K = {layers}; {self.config['architectures'][0]}")
            if self.quantized:
                self._is_quantized(generator.executor.collective_rpc(_methods)[0])
            if self.known and self._as_transformers(results, layers):
                return
            self._against_single(generator, results)
            if self.known or (not self.full and self.tp_size == 1):
                self._against_log_probabilities(generator, results)
            elif not self.full:
                # Random weights are made for each shard; one device would have others.
                self.lines.append("compared   not with log-probabilities of vLLM: that takes --tp-size 1")
        finally:
            generator.executor.shutdown()

    def _is_quantized(self, methods: Sequence[str]) -> None:
        quantized = [name for name in methods if not name.startswith("Unquantized") and "KVCache" not in name]
        if not quantized:
            raise CompatError(f"expected quantised layers in vLLM's model; found {', '.join(methods)} alone")
        self.lines.append(f"layers     {', '.join(quantized)}")

    def _as_transformers(self, results: Sequence[Any], layers: list[int]) -> bool:
        from spec_vllm_compat.cli.compare import compare

        text, wrong = compare(str(self.place), results, layers, trust_remote_code=self.trust_remote_code)
        if wrong:
            text = f"DIFFERENT: {wrong[0][1]}; {text}"
        self.lines.append(f"compared   with Transformers in float32: {text}")
        if swapped := next((why for _, why in wrong if "holds layer" in why), None):
            # Of the layers, the log-probabilities see the last one alone.
            raise CompatError(f"rows differ from Transformers: {swapped}")
        return not wrong

    def _against_single(self, generator: Any, results: Sequence[Any]) -> None:
        import torch

        from spec_vllm_compat.cli.compare import TOLERANCE, row_errors

        own, neighbours = [], []
        for together in results:
            (alone,) = generator.generate([together["input_ids"].tolist()])
            for got, want in zip(together["hidden_states"], alone["hidden_states"], strict=True):
                own.append(row_errors(got, want))
                neighbours.append(row_errors(got[1:], want[:-1]))
        text = self._judge("one at a time", torch.cat(own), torch.cat(neighbours), TOLERANCE)
        self.lines.append(f"compared   batches with one sequence at a time, relative error: {text}")

    def _against_log_probabilities(self, generator: Any, results: Sequence[Any]) -> None:
        import torch

        from spec_vllm_compat.cli.logprobs import NATS, differences, of_vllm

        prompts = [sample["input_ids"].tolist() for sample in results]
        judged = of_vllm(generator, prompts, random_weights=not self.known)
        own, neighbours = [], []
        for sample, expected in zip(results, judged, strict=True):
            rows = sample["hidden_states"][-1][: len(expected)]  # the last row predicts a token that is not there
            if len(expected) > 1:
                own.append(differences(generator, rows, expected))
                neighbours.append(differences(generator, rows.roll(1, dims=0), expected))
        others = torch.cat(neighbours)
        # Rounding grows with the logits, and so does what the rows of others would be off by.
        tolerance = round(max(NATS, float(others.median()) / 20), 2)
        text = self._judge("vLLM's log-probabilities", torch.cat(own), others, tolerance)
        self.lines.append(f"compared   with log-probabilities of unpatched vLLM, nats: {text}")
        if self.known:
            self.lines.append(
                "compared   so these rows are vLLM's own: vLLM itself computes other numbers than Transformers"
            )

    def _judge(self, what: str, own: Any, neighbours: Any, tolerance: float) -> str:
        """A comparison counts only where it would have seen the rows of neighbours."""
        far, seen = int((~(own <= tolerance)).sum()), float((neighbours > tolerance).float().mean())
        text = (
            f"{counted(len(own), 'row')}, {float(own.median()):.2g} (median), {float(own.max()):.2g} (worst), {far} beyond "
            f"{tolerance}; neighbours' rows would be off by {float(neighbours.median()):.2g}"
        )
        if seen < 0.9:
            raise CompatError(f"{what}: the comparison could not tell right rows from wrong ones: {text}")
        # Rounding depends on the batch, and so, in a few rows, does the choice of experts.
        if far > (len(own) // 10 if any(name in text_part(self.config) for name in ROUTED) else 0):
            raise CompatError(f"rows differ from {what}: {text}")
        return text


def use_states(worker: Any) -> None:
    """In the worker: recurrent states as other requests leave them. They are zero in a new engine alone."""
    from spec_vllm_compat.worker.recurrent import states

    for _, state in states(worker):
        state.fill_(1)


def _methods(worker: Any) -> list[str]:
    """In the worker: how vLLM holds the weights of its layers."""
    methods = (getattr(module, "quant_method", None) for module in worker.model_runner.model.modules())
    return sorted({type(method).__name__ for method in methods if method is not None})


def _tokenizer(place: Path, size: int) -> None:
    """Some tokenizer: speculators loads one and asks it for nothing but its end token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(min(size, VOCABULARY))}, unk_token="t2"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t1", unk_token="t2"
    ).save_pretrained(place)
