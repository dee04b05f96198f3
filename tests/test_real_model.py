"""A trained model with its own tokenizer and chat template.

Its activations are those of a real model: one channel reaches 24,874, so errors are relative and by row.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.stack
LAYERS = [2, 15, 27, 29]
CHATS = [
    "What is the capital of France?",
    "Explain what a prime number is and name the first ten.",
    "Why is the sky blue?",
]

#: A row of a neighbouring layer or position is off by more than 0.4 in this model. Rounding to bfloat16, on a CPU
#: without AVX-512: 0.02 in the median, one row of 920, by which Transformers' own run is off by 0.05, by 0.13, others by 0.08.
HALF = 0.2


@pytest.mark.parametrize("float32", [False, True], ids=["bfloat16", "float32"])
def test_rows_of_smollm2(build, smollm2, reference, float32):
    import torch

    from reference import FLOAT32, assert_rows
    from spec_vllm_compat.cli.compare import compare

    generator = build(smollm2, float32=float32, layer_ids=LAYERS, max_model_len=2048, gpu_memory_utilization=0.8)
    prompts = [
        generator.tokenizer.apply_chat_template([{"role": "user", "content": chat}], add_generation_prompt=True)
        for chat in CHATS
    ]
    prompts.append([token for prompt in prompts for token in prompt] * 8)
    results = generator.generate(prompts)

    for ids, result in zip(prompts, results, strict=True):
        assert result["hidden_states"][0].dtype is (torch.float32 if float32 else torch.bfloat16)
        assert_rows(result, ids, LAYERS, reference(smollm2), FLOAT32 if float32 else HALF)
    text, wrong = compare(str(smollm2), results, LAYERS)
    assert not wrong, text


def test_the_judge_knows_rows_that_rounding_hits(smollm2, reference):
    import torch
    from transformers import AutoModelForCausalLM

    from spec_vllm_compat.cli.compare import TOLERANCE, compare, row_errors

    layer, ids = 12, list(range(100, 240))
    want = reference(smollm2)(ids)
    half = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rounded = half(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer + 1][0]
    hit = int(row_errors(rounded, want[layer]).argmax())
    quiet = int(row_errors(rounded, want[layer]).argmin())

    def judged(row, error):
        rows = want[layer].clone()
        rows[row] *= 1 + error
        return compare(
            str(smollm2), [{"input_ids": torch.tensor(ids), "hidden_states": [rows.to(torch.bfloat16)]}], [layer]
        )[1]

    error = float(row_errors(rounded, want[layer])[hit])
    assert 2 * error > TOLERANCE
    assert not judged(hit, 2 * error)
    assert "1 of 140 rows" in judged(quiet, 2 * error)[0][1]
    assert "1 of 140 rows" in judged(hit, 0.4)[0][1]
