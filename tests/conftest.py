from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("SPEC_VLLM_COMPAT_CACHE", ROOT / ".cache"))
VOCABULARY = 512

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(ROOT / "tools"))

STACK = all(importlib.util.find_spec(name) for name in ("torch", "vllm", "speculators"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stack: needs the real vLLM and speculators")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if STACK:
        return
    for item in items:
        if "stack" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="vllm, speculators or torch is not installed"))


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds seeded random checkpoints: ``small_model(family="llama", layers=6)``."""
    built: dict[tuple[str, int], Path] = {}

    def build(family: str = "llama", layers: int = 6) -> Path:
        key = (family, layers)
        if key not in built:
            built[key] = tmp_path_factory.mktemp("models") / f"{family}-{layers}"
            _build(built[key], family, layers)
        return built[key]

    return build


def _build(path: Path, family: str, layers: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(11)
    config = AutoConfig.for_model(
        family,
        **({"sliding_window": 256} if family == "gemma3_text" else {}),
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t1", unk_token="t2"
    ).save_pretrained(path)


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    from reference import Reference

    made: dict[Path, Any] = {}

    def of(path: Path) -> Any:
        if path not in made:
            made[path] = Reference(path)
        return made[path]

    return of


@pytest.fixture(scope="session")
def smollm2() -> Path:
    import smollm2

    return smollm2.checkpoint(CACHE)


@pytest.fixture
def batch() -> Callable[..., list[list[int]]]:
    def make(*lengths: int, seed: int = 0) -> list[list[int]]:
        rng = random.Random(f"{seed} {lengths}")
        return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]

    return make


@pytest.fixture(scope="session")
def generator_module() -> Any:
    """speculators' generator module, patched."""
    import spec_vllm_compat  # noqa: F401, I001
    from speculators.data_generation import vllm_hidden_states_generator

    return vllm_hidden_states_generator


@pytest.fixture(scope="module")
def build(generator_module: Any) -> Iterator[Callable[..., Any]]:
    """Builds a generator; ``float32=True`` for strict numbers. All are shut down after the module."""
    made: list[Any] = []

    def make(path: Path, *, float32: bool = False, layer_ids: list[int] | None = None, **kwargs: Any) -> Any:
        kwargs.setdefault("max_model_len", 512)
        kwargs.setdefault("gpu_memory_utilization", 0.3)
        original = generator_module.ModelConfig
        if float32:
            generator_module.ModelConfig = lambda **keywords: original(**{**keywords, "dtype": "float32"})
        try:
            generator = generator_module.VllmHiddenStatesGenerator(str(path), layer_ids=layer_ids, **kwargs)
        finally:
            generator_module.ModelConfig = original
        made.append(generator)
        return generator

    yield make
    for generator in made:
        generator.executor.shutdown()
