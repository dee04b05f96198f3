"""Representatives of the table of architectures on the real stack, and whose code may run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import architectures

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    ("name", "container", "output"),
    [
        # Scaled embeddings and residuals, and layers that return a residual which is not to be added.
        ("granite-4", "model.layers", "hidden, which includes the returned residual"),
        # Every layer has a sliding window, which speculators does not hand to vLLM.
        ("mistral", "model.layers", "hidden + residual"),
        # A vision wrapper, experts, yarn, code that comes with the checkpoint, a configuration that Transformers lacks.
        ("kimi-k2.5", "language_model.model.layers", "hidden + residual"),
    ],
)
def test_every_row_of_every_layer(name: str, container: str, output: str) -> None:
    found = architectures.supervise(name, 280)
    assert found["state"] == "right", found
    assert (found["container"], found["output"]) == (container, output)


def test_several_streams_are_refused() -> None:
    """Gemma 3n keeps four streams; no one of them is the residual stream."""
    found = architectures.supervise("gemma-3n-text", 280)
    assert found["state"] == "refused", found
    assert "expected a layer to return one residual stream [tokens, hidden_size]; found float32 [4, " in found["note"]


CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()
Path({folder!r}, "ran").touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


@pytest.fixture
def own_code(tmp_path: Path, small_model: Any) -> Path:
    """A checkpoint whose configuration and tokenizer are classes of its own."""
    path = tmp_path / "own-code"
    path.mkdir()
    for file in small_model().iterdir():
        if file.suffix == ".json":
            (path / file.name).write_text(file.read_text())
    (path / "own.py").write_text(CODE.format(folder=str(tmp_path)))
    for name, changes in {
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
        },
    }.items():
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def test_code_of_the_checkpoint_is_trusted_by_default(
    generator_module: Any, own_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import spec_vllm_compat

    monkeypatch.delenv("SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE", raising=False)
    assert type(generator_module.AutoTokenizer.from_pretrained(str(own_code))).__name__ == "OwnTokenizer"
    assert generator_module.AutoConfig.from_pretrained(str(own_code), trust_remote_code=True).num_hidden_layers == 6
    assert (own_code.parent / "ran").exists()
    assert "code that comes with a checkpoint is trusted" in str(spec_vllm_compat.report())


def test_trust_can_be_turned_off(generator_module: Any, own_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import spec_vllm_compat

    monkeypatch.setenv("SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE", "0")
    for load in (
        lambda: generator_module.VllmHiddenStatesGenerator(str(own_code), layer_ids=[1]),
        lambda: generator_module.AutoConfig.from_pretrained(str(own_code), trust_remote_code=True),
        lambda: generator_module.ModelConfig(model=str(own_code), tokenizer=str(own_code), trust_remote_code=True),
    ):
        with pytest.raises(Exception, match="trust_remote_code"):
            load()
    assert not (own_code.parent / "ran").exists()
    assert "code that comes with a checkpoint is not run" in str(spec_vllm_compat.report())


def test_the_report_names_the_layers(build: Any, small_model: Any, batch: Any) -> None:
    import spec_vllm_compat

    path = small_model()
    generator = build(path, layer_ids=[4, 0])
    assert f"{path}: layers model.layers.K, K = [4, 0]" in spec_vllm_compat.report().generators
    generator.generate(batch(5))
    said = f"{path}: layers model.layers.K, K = [4, 0]; a row is what a layer returns as hidden + residual"
    assert said in spec_vllm_compat.report().generators
    assert f"generator of {said}" in str(spec_vllm_compat.report())


@pytest.mark.parametrize(
    ("on_cpu", "wrong", "custom_ops"),
    [
        (True, ["rotary_embedding"], ["-rotary_embedding"]),
        (True, ["rms_norm", "rotary_embedding"], ["-rms_norm", "-rotary_embedding"]),
        (True, [], None),
        (False, ["rms_norm"], None),
    ],
)
def test_wrong_operators_are_not_used(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, wrong: list[str], custom_ops: list[str] | None
) -> None:
    from vllm.platforms import current_platform

    from spec_vllm_compat.patches import cpu_operators

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    for name in ("rms_norm", "rotary_embedding"):
        monkeypatch.setattr(cpu_operators, f"{name}_is_right", lambda right=name not in wrong: right)
    keywords: dict[str, Any] = {}
    cpu_operators._adapt(None, keywords)
    config = keywords.get("compilation_config")
    assert (config.custom_ops if config else None) == custom_ops


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the operators for CPU")
def test_operators_are_tried_as_models_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once vLLM's operators are repaired: then say so in the record of the patch set."""
    from vllm import _custom_ops

    from spec_vllm_compat.patches import cpu_operators

    assert not cpu_operators.rotary_embedding_is_right()
    assert not cpu_operators.rms_norm_is_right()

    def repaired(out: Any, values: Any, weight: Any, epsilon: float) -> None:
        out.copy_(values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon) * weight)

    monkeypatch.setattr(_custom_ops, "rms_norm", repaired)
    assert cpu_operators.rms_norm_is_right()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (None, 64),
        (["sliding_attention"] * 2, 64),
        (["sliding_attention", "full_attention"], None),
        (["full_attention"], None),
    ],
)
def test_the_window_of_every_layer_reaches_vllm(kinds: list[str] | None, expected: int | None) -> None:
    from types import SimpleNamespace as Made

    from spec_vllm_compat.patches import sliding_window

    text = Made() if kinds is None else Made(layer_types=kinds)
    cache = Made(sliding_window=None)
    model = Made(hf_text_config=text, get_sliding_window=lambda: 64)
    sliding_window._adapt(None, {"model_config": model, "cache_config": cache})
    assert cache.sliding_window == expected
