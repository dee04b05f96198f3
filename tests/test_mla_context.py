"""MLA on model runner V2: steps in which vLLM gives the earlier part of a prompt to the wrong sequence are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from spec_vllm_compat.patches import mla_model_runner
from spec_vllm_compat.protocol import Chunk
from spec_vllm_compat.worker.capture import require_mla_context_in_place
from spec_vllm_compat.worker.layers import CaptureError


def state(chunks: list[Chunk], decodes: int) -> SimpleNamespace:
    """The step's state as vLLM 0.23.0 builds it: so many tokens get context as the first so many sequences have."""
    prefills = chunks[decodes:]
    with_context = sum(chunk.start > 0 for chunk in prefills)
    tokens = sum(chunk.rows for chunk in prefills[:with_context])
    context = SimpleNamespace(prefill_tokens_with_context=tokens) if with_context else None
    layer = SimpleNamespace(num_decodes=decodes, prefill=SimpleNamespace(chunked_context=context) if prefills else None)
    return SimpleNamespace(attn_metadata={"model.layers.0.self_attn.attn": layer})


# The second step of the batch of benchmarks/mla.py on model runner V2, which sorts by length.
SECOND_STEP = [Chunk("a", 0, 2), Chunk("b", 0, 300), Chunk("c", 3254, 646), Chunk("d", 0, 1000)]


def test_a_new_prompt_before_the_rest_of_an_older_one_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"b \(tokens 0 to 300\).*VLLM_USE_V2_MODEL_RUNNER=0"):
        require_mla_context_in_place(state(SECOND_STEP, decodes=1), SECOND_STEP)  # FlashMLA: decodes are of one length


def test_the_rest_of_an_older_prompt_after_all_that_was_given_context_is_refused() -> None:
    chunks = [Chunk("a", 512, 40), Chunk("b", 0, 300), Chunk("c", 3254, 646)]
    broken = state(chunks, decodes=0)
    broken.attn_metadata["model.layers.0.self_attn.attn"].prefill.chunked_context.prefill_tokens_with_context = 40
    with pytest.raises(CaptureError, match=r"c \(tokens 3254 to 3900\)"):
        require_mla_context_in_place(broken, chunks)


@pytest.mark.parametrize(
    ("chunks", "decodes"),
    [
        (SECOND_STEP, 2),  # FlashAttention takes up to 512 tokens as decoding
        (sorted(SECOND_STEP, key=lambda chunk: -chunk.start), 0),  # older prompts first, as model runner V1 has them
        ([Chunk("a", 0, 2), Chunk("b", 0, 300)], 0),
        ([Chunk("a", 8, 2), Chunk("b", 8, 300)], 2),
    ],
)
def test_a_step_that_vllm_computes_right_passes(chunks: list[Chunk], decodes: int) -> None:
    require_mla_context_in_place(state(chunks, decodes), chunks)


@pytest.mark.parametrize(
    "other",
    [
        None,
        (SimpleNamespace(req_ids=["c"]),),  # a tuple, up to vLLM 0.17
        SimpleNamespace(attn_metadata=None),
        SimpleNamespace(attn_metadata={"layer": SimpleNamespace(num_prefills=1)}),  # not MLA
        SimpleNamespace(  # MLA of vLLM 0.28 and newer
            attn_metadata={
                "layer": SimpleNamespace(num_decodes=0, prefill=SimpleNamespace(chunked_context=SimpleNamespace()))
            }
        ),
    ],
)
def test_other_states_pass(other: object) -> None:
    require_mla_context_in_place(other, SECOND_STEP)


@pytest.mark.parametrize(("mla", "before", "after"), [(True, None, "0"), (True, "1", "1"), (False, None, None)])
def test_mla_models_stay_on_model_runner_v1(
    monkeypatch: pytest.MonkeyPatch, mla: bool, before: str | None, after: str | None
) -> None:
    monkeypatch.setenv(mla_model_runner.CHOICE, "to be put back")
    if before is None:
        monkeypatch.delenv(mla_model_runner.CHOICE)
    else:
        monkeypatch.setenv(mla_model_runner.CHOICE, before)
    mla_model_runner._adapt(None, {"model_config": SimpleNamespace(use_mla=mla)})  # type: ignore[arg-type]
    assert os.environ.get(mla_model_runner.CHOICE) == after


@pytest.mark.parametrize(
    ("source", "needed"), [("prefill_tokens_with_context: int", True), ("merge_all", False), (None, False)]
)
def test_the_source_of_mla_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, needed: bool
) -> None:
    if source is not None:
        file = tmp_path / "model_executor" / "layers" / "attention" / "mla_attention.py"
        file.parent.mkdir(parents=True)
        file.write_text(source)
    monkeypatch.setattr(
        mla_model_runner, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert mla_model_runner._probe(None).needed is needed  # type: ignore[arg-type]
