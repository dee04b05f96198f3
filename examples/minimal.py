"""The smallest extraction: one import line before speculators, nothing else changes.

python examples/minimal.py MODEL_PATH
"""

import spec_vllm_compat  # noqa: F401, I001 - before speculators

import sys

from speculators.data_generation import VllmHiddenStatesGenerator

if __name__ == "__main__":
    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[2, 15, 27, 29], max_model_len=2048)
    text = "The capital of France is Paris."
    for sample in generator.generate([generator.tokenizer(text)["input_ids"]]):
        for layer, rows in zip(generator.layer_ids, sample["hidden_states"], strict=True):
            print(f"layer {layer}: {tuple(rows.shape)} {rows.dtype}")
