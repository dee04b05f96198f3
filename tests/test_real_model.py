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


def test_rows_of_smollm2(build, smollm2, reference):
    import torch
    from transformers import AutoModelForCausalLM

    from reference import assert_rows, row_error

    generator = build(smollm2, layer_ids=LAYERS, max_model_len=2048, gpu_memory_utilization=0.8)
    prompts = [
        generator.tokenizer.apply_chat_template([{"role": "user", "content": chat}], add_generation_prompt=True)
        for chat in CHATS
    ]
    prompts.append([token for prompt in prompts for token in prompt] * 8)
    results = generator.generate(prompts)

    # Yardstick: how far Transformers' own bfloat16 run is off. Ours may be off by twice that; measured: about the same.
    # Neighbouring layers and rows are off by more than 0.4, which assert_rows checks as well.
    half = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        states = half(torch.tensor([prompts[-1]]), output_hidden_states=True).hidden_states
    want = reference(smollm2)(prompts[-1])
    yardstick = max(row_error(states[layer + 1][0], want[layer]) for layer in LAYERS[:-1])
    assert yardstick < 0.12, "the yardstick itself must tell right rows from wrong ones"
    for ids, result in zip(prompts, results, strict=True):
        assert result["hidden_states"][0].dtype is torch.bfloat16
        assert_rows(result, ids, LAYERS, reference(smollm2), 2 * yardstick)
