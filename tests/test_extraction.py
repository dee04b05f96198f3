"""The main job on the real stack: rows of the original entry point against Transformers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

pytestmark = pytest.mark.stack
LAYERS = [4, 0, 2, 5, 2]  # not ascending, one twice, the last layer included


@pytest.fixture(scope="module")
def generator(build, small_model):
    return build(small_model(), float32=True, layer_ids=LAYERS, max_model_len=2048)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((37,), id="one sequence"),
        pytest.param((1, 90, 1, 7), id="single tokens among others"),
        pytest.param((12, 30, 7, 55, 21, 90, 4, 66, 33, 10, 71, 28, 45), id="more than ten"),
        pytest.param(tuple(range(3, 43)), id="more than max_num_seqs"),
        pytest.param((2000, 1900, 2000, 1500, 1700), id="a prompt over two steps"),
    ],
)
def test_rows_are_those_of_transformers(generator, batch, small_model, reference, lengths):
    from reference import FLOAT32, assert_rows

    prompts = batch(*lengths)
    results = generator.generate(prompts)
    assert len(results) == len(prompts)
    for ids, result in zip(prompts, results, strict=True):
        assert result["loss_mask"] is None
        assert all(rows.device.type == "cpu" for rows in result["hidden_states"])
        assert_rows(result, ids, LAYERS, reference(small_model()), FLOAT32)


def test_shared_prefixes_and_repeated_sequences(generator, batch, small_model, reference):
    from reference import FLOAT32, assert_rows

    (prefix,) = batch(96)
    prompts = [prefix + tail for tail in batch(24, 60, 1)] + [prefix, prefix]
    for _ in range(2):
        for ids, result in zip(prompts, generator.generate(prompts), strict=True):
            assert_rows(result, ids, LAYERS, reference(small_model()), FLOAT32)


def test_a_tensor_is_taken_as_a_batch(generator, batch):
    prompts = batch(*[48] * 12)
    from_lists, from_tensor = generator.generate(prompts), generator.generate(torch.tensor(prompts))
    for one, other in zip(from_lists, from_tensor, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert all(torch.equal(a, b) for a, b in zip(one["hidden_states"], other["hidden_states"], strict=True))


def test_sequences_are_cut_as_speculators_does(generator, batch):
    (prompt,) = batch(2100)
    (result,) = generator.generate([prompt])
    assert result["input_ids"].tolist() == prompt[:2047]
    assert result["hidden_states"][0].shape == (2047, 128)


def test_qwen3(build, small_model, batch, reference):
    from reference import FLOAT32, assert_rows

    path = small_model("qwen3")
    generator = build(path, float32=True, layer_ids=[1, 3, 5])
    prompts = batch(25, 140, 3)
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, [1, 3, 5], reference(path), FLOAT32)


def test_embedding_scale_is_kept(build, small_model, batch, reference):
    """Granite scales its embeddings and its residuals; the forward pass that speculators puts in knows neither."""
    from reference import FLOAT32, assert_rows

    path = small_model("granite")
    generator = build(path, float32=True, layer_ids=[1, 4])
    prompts = batch(40, 9)
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, [1, 4], reference(path), FLOAT32)


def test_layers_of_several_kinds(build, small_model, batch, reference):
    """Gemma 3 has sliding-window and full attention layers: two groups in the KV cache, planned by vLLM."""
    from reference import FLOAT32, assert_rows

    path = small_model("gemma3_text")
    generator = build(path, float32=True, layer_ids=[0, 4, 5], max_model_len=2048)
    prompts = batch(1200, 9, 700)
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, [0, 4, 5], reference(path), FLOAT32)
    specs = {type(group.kv_cache_spec).__name__ for group in generator.scheduler.kv_cache_config.kv_cache_groups}
    assert specs == {"FullAttentionSpec", "SlidingWindowSpec"}
