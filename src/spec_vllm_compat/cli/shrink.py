"""Makes a small copy of a model's configuration that keeps its architecture: same classes, same kinds of layers."""

from __future__ import annotations

import copy
from typing import Any

from spec_vllm_compat.cli.target import text_part
from spec_vllm_compat.errors import CompatError

VOCABULARY = 512
HEADS = 4
EXPERTS = 8
BLOCK = 128  # widths are multiples of it: kernels for quantised weights know no others

#: Sizes that are cut to at most so much wherever they occur in the language part.
_AT_MOST = {
    "num_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 128, "first_k_dense_replace": 1, "sliding_window": 128,
    "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
#: The same for sizes that devices share: so much for each.
_AT_MOST_EACH = {
    "moe_intermediate_size": BLOCK, "shared_expert_intermediate_size": BLOCK, "expert_ffn_hidden_size": BLOCK,
    "ffn_hidden_size": 4 * BLOCK, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip

#: Older names of the sizes that are made small.
_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def shrink(config: dict[str, Any], *, keep_vocabulary: bool, tp_size: int = 1) -> dict[str, Any]:
    """The small copy of a full ``config.json``, large enough for ``tp_size`` devices to share.

    With ``keep_vocabulary`` the model's own tokenizer will be used, and token ids stay. CompatError for a model without heads.
    """
    small = copy.deepcopy(config)
    text = text_part(small)
    for new, old in _NAMES.items():
        if new not in text and old in text:
            text[new] = text.pop(old)
    old_hidden, old_layers = text["hidden_size"], int(text["num_hidden_layers"])
    layers = _fewer_layers(text, old_layers)
    if "max_window_layers" in text:
        text["max_window_layers"] = min(text["max_window_layers"], layers)
    for name, most in (_AT_MOST | {name: each * tp_size for name, each in _AT_MOST_EACH.items()}).items():
        if isinstance(text.get(name), int):
            text[name] = min(text[name], most)
    _heads(text, tp_size)
    wide = 2 * text["hidden_size"]
    text["intermediate_size"] = [wide] * layers if isinstance(text.get("intermediate_size"), list) else wide
    if "initializer_range" in text:
        text["initializer_range"] = 0.08  # so that layers and positions differ by more than rounding
    if not keep_vocabulary:
        _vocabulary(small, text)
    _vision(small, old_hidden, text["hidden_size"])
    return small


def _fewer_layers(text: dict[str, Any], old: int) -> int:
    layers = _layers(text)
    for name, value in text.items():
        if isinstance(value, list) and len(value) == old:  # one entry a layer
            text[name] = value[:layers]
        elif isinstance(value, list) and name in ("attn_layer_indices", "mlp_only_layers"):  # numbers of layers
            text[name] = [layer for layer in value if layer < layers]
    text["num_hidden_layers"] = layers
    if "num_layers" in text:  # LongCat: two attention blocks a layer
        text["num_layers"] = max(1, layers * int(text["num_layers"]) // old)
    return layers


def _layers(text: dict[str, Any]) -> int:
    """So many that every kind of layer occurs, and at least four."""
    kinds = text.get("layer_types")
    needed = 4
    if kinds:
        needed = max(needed, max(kinds.index(kind) for kind in set(kinds)) + 1)
    for name in ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"):
        if isinstance(text.get(name), int):
            needed = max(needed, text[name])
    return min(needed, int(text["num_hidden_layers"]))


def _heads(text: dict[str, Any], tp_size: int) -> None:
    """Fewer heads of the same width: kernels know only some widths. Each device has as many."""
    if "num_attention_heads" not in text:
        raise CompatError(
            "expected a model with attention heads, whose number can be made smaller; found none in the configuration. "
            "Try it with --full-config."
        )
    heads = text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // heads
    shared = heads // max(1, text.get("num_key_value_heads") or heads)
    each = HEADS
    while each * width % BLOCK:
        each *= 2
    text["num_attention_heads"] = few = each * tp_size
    if "num_key_value_heads" in text:
        text["num_key_value_heads"] = few if shared == 1 else few // 2
    text["hidden_size"] = few * width
    if "mamba_n_heads" in text and "mamba_d_ssm" not in text:
        inner, width = text.get("mamba_expand", 2) * text["hidden_size"], text.get("mamba_d_head")
        text["mamba_n_heads"] = inner // width if isinstance(width, int) else 2 * few


def _vocabulary(config: dict[str, Any], text: dict[str, Any]) -> None:
    text["vocab_size"] = VOCABULARY
    following = iter(range(VOCABULARY - 1, 0, -1))
    for part in (config, text):
        for name, value in part.items():
            if not name.endswith("_token_id") or value is None:
                continue
            special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
            part[name] = special[name] if name in special else next(following)


def _vision(config: dict[str, Any], old_hidden: int, new_hidden: int) -> None:
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return
    for name in ("depth", "num_hidden_layers"):
        if name in vision:
            vision[name] = min(vision[name], 3)
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [0, 1, 2][: len(vision["deepstack_visual_indexes"])]
    for name in ("out_hidden_size", "text_hidden_size", "mm_hidden_size"):
        if vision.get(name) == old_hidden or name == "out_hidden_size":
            vision[name] = new_hidden
