"""Seeded random Llama checkpoints of any size, for measurements. Sizes are real, weights are not."""

from __future__ import annotations

import os
from pathlib import Path

# As in the tests: small KV cache on CPU, quiet, no hub. A measurement on a GPU is not touched by the first.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def build(
    path: Path,
    *,
    layers: int = 6,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 512,
) -> Path:
    """Write a bfloat16 checkpoint with a word tokenizer to ``path`` and return it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.08 if hidden < 512 else 0.02,
        tie_word_embeddings=False,
    )
    with torch.device("cuda" if torch.cuda.is_available() and hidden >= 2048 else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t1", unk_token="t2"
    ).save_pretrained(path)
    return path
