"""The architectures of the table: how a small checkpoint of each is built, and what Transformers computes for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
SIZES = {
    **TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,  # so that layers and positions differ by more than rounding
    "tie_word_embeddings": False,
}
MLA = {"VLLM_MLA_DISABLE": "1"}  # vLLM's CPU platform has no MLA attention


TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        model_type: of Transformers' configuration class.
        config: arguments of that class.
        cls: name of the model class in Transformers; None: that of ``AutoModelForCausalLM``.
        architectures: name that ``config.json`` gives to vLLM, where it is not Transformers' own.
        environment: variables that the run needs.
        dtype: in which vLLM computes.
        ranks: tensor parallel size.
        expert_parallel: whether the ranks share experts out whole.
        additional: vLLM's ``additional_config``.
        finish: changes the saved checkpoint.
        adapt: changes the reference.
        told: whether Transformers' ``hidden_states[k + 1]`` is the output of layer k, as for nearly all.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    cls: str | None = None
    architectures: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    ranks: int = 1
    expert_parallel: bool = False
    additional: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None
    adapt: Callable[[Any], None] | None = None
    name: str | None = None
    told: bool = True

    @property
    def title(self) -> str:
        return self.name or self.architectures or self.cls or self.model_type

    @property
    def text(self) -> dict[str, Any]:
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    def model(self, config: Any) -> Any:
        import transformers

        cls = getattr(transformers, self.cls) if self.cls else transformers.AutoModelForCausalLM
        return cls(config) if self.cls else cls.from_config(config)

    def build(self, path: Path) -> None:
        import torch
        from transformers import AutoConfig

        torch.manual_seed(11)
        model = self.model(AutoConfig.for_model(self.model_type, **self.config)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and "norm" in name:  # random, or a norm could be skipped unseen
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "e_score_correction_bias" in name or not parameter.any():
                    parameter.normal_(std=0.02)
        model.save_pretrained(path)
        tokenizer(path)
        if self.architectures:
            edit(path / "config.json", architectures=[self.architectures])
        if self.finish:
            self.finish(path)

    def reference(self, path: Path, dtype: str = "float32") -> Reference:
        import transformers

        cls = getattr(transformers, self.cls) if self.cls else transformers.AutoModelForCausalLM
        source = path / "reference" if (path / "reference").exists() else path
        reference = Reference(cls.from_pretrained(source, dtype=dtype).eval(), self.layers, self.told)
        if self.adapt:
            self.adapt(reference.model)
        return reference


class Reference:
    """Transformers in float32, one sequence at a time; the last layer before the final norm."""

    def __init__(self, model: Any, count: int, told: bool) -> None:
        from spec_vllm_compat.worker.layers import find_decoder_layers

        self.model, self._told = model, told
        self._seen: dict[int, Any] = {}
        container, layers = find_decoder_layers(model, count)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(lambda _m, _i, out, index=index: self._keep(index, out))
        self.decoder = model.get_submodule(container.rpartition(".")[0])

    def _keep(self, index: int, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        self._seen[index] = rows.reshape(-1, rows.shape[-1]).clone()

    def __call__(self, ids: Sequence[int]) -> dict[int, Any]:
        """Layer id to its output ``[len(ids), hidden_size]``."""
        import torch

        with torch.no_grad():
            output = self.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        states = dict(self._seen)
        for k in range(len(states) - 1 if self._told else 0):  # the last entry there is normed
            assert torch.equal(states[k], output.hidden_states[k + 1][0]), f"layer {k} is not hidden_states[{k + 1}]"
        return states

    def logits(self, ids: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def head(self, rows: Any) -> Any:
        """Logits ``[tokens, vocabulary]`` from rows of the last layer: what follows the layers in this very model."""
        import torch

        # The last layer's output is exchanged for the rows, so final norm, head, caps and scales are the model's own.
        _, layers = next((n, m) for n, m in self.decoder.named_children() if len(list(m.children())) == len(self._seen))
        last = list(layers.children())[-1]

        def exchange(_module: Any, _args: Any, output: Any) -> Any:
            new = rows.float()[None]
            return (new, *output[1:]) if isinstance(output, tuple) else new

        handle = last.register_forward_hook(exchange)
        try:
            with torch.no_grad():
                return self.model(torch.zeros(1, len(rows), dtype=torch.long) + 5, use_cache=False).logits[0]
        finally:
            handle.remove()


def tokenizer(path: Path, cls: str = "PreTrainedTokenizerFast", **special: str) -> Any:
    """Some tokenizer: speculators loads one and asks it for nothing but its end token.

    Processors of vision models want special tokens; they take the last places of the vocabulary, by their order.
    """
    import transformers
    from tokenizers import Tokenizer, models

    names = [f"t{i}" for i in range(VOCABULARY)]
    names[4:8] = ["\n" * count for count in (1, 2, 3, 4)]  # Gemma 3's processor looks them up
    names[VOCABULARY - len(special) :] = special.values()
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t2"))
    made = getattr(transformers, cls)(
        tokenizer_object=words,
        bos_token="t0",
        eos_token="t1",
        pad_token="t1",
        unk_token="t2",
        extra_special_tokens=special,
    )
    made.save_pretrained(path)
    return made


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps(content, indent=1))


def float16(path: Path) -> None:
    edit(path / "config.json", dtype="float16", torch_dtype="float16")


def plain_names(path: Path) -> None:
    """Gemma 3n's text model as it is loaded, without the prefix under which Transformers saves it for the wrapper."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    names = {name: name.replace("language_model.", "").replace(".language_model_", "_") for name in weights}
    save_file(
        {names[name]: value for name, value in weights.items()}, path / "model.safetensors", metadata={"format": "pt"}
    )


def without_buffers(path: Path) -> None:
    """MiniMax's decay rates are computed; Transformers saves them all the same, and the released checkpoint has none."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "decay" not in name and "slope_rate" not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def gemma_processor(path: Path) -> None:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    words = tokenizer(path, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    Gemma3Processor(Gemma3ImageProcessor(size={"height": 56, "width": 56}), words, image_seq_length=4).save_pretrained(
        path
    )


def qwen_processor(path: Path) -> None:
    from transformers import Qwen2VLImageProcessorFast, Qwen3VLProcessor, Qwen3VLVideoProcessor

    words = tokenizer(
        path, "Qwen2TokenizerFast", image_token="<|image_pad|>", video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>",
    )  # fmt: skip
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    images = Qwen2VLImageProcessorFast(**sizes, size={"shortest_edge": 1024, "longest_edge": 4096})
    videos = Qwen3VLVideoProcessor(**sizes, size={"shortest_edge": 1024, "longest_edge": 4096})
    Qwen3VLProcessor(images, words, videos).save_pretrained(path)


#: Code that comes with the checkpoint, as Kimi's does: a tokenizer that Transformers does not know, and an image processor.
KIMI_CODE = """
import torch
from transformers import BaseImageProcessor, PreTrainedTokenizerFast


class KimiTokenizer(PreTrainedTokenizerFast):
    pass


class KimiProcessor(BaseImageProcessor):
    media_proc_cfg = {"patch_size": 14, "merge_kernel_size": 2}
    num_frames_per_chunk = 4

    def __init__(self, **keywords):
        super().__init__(**keywords)

    def media_tokens_calculator(self, media):
        return 4

    def split_video_chunks(self, video):
        return []

    def preprocess(self, medias, **keywords):
        return {"pixel_values": torch.zeros(16 * len(medias), 3, 14, 14), "grid_thws": torch.tensor([[1, 4, 4]] * len(medias))}
"""


def kimi(path: Path) -> None:
    """Turn a DeepSeek-V3 checkpoint into one like Kimi-K2.5's: a wrapper, a vision tower, code of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    text = json.loads((path / "config.json").read_text())
    reference = path / "reference"
    reference.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).rename(reference / name)
    weights = {f"language_model.{name}": value for name, value in load_file(reference / "model.safetensors").items()}
    vision = {
        "hidden_size": 64, "mm_hidden_size": 64, "text_hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
        "num_hidden_layers": 2, "patch_size": 14, "merge_kernel_size": [2, 2], "init_pos_emb_height": 8,
        "init_pos_emb_width": 8, "init_pos_emb_time": 4, "model_type": "kimi_k25_vision", "mm_projector_type": "patchmerger",
    }  # fmt: skip
    torch.manual_seed(12)
    weights |= {name: 0.02 * torch.randn(shape) for name, shape in kimi_vision_shapes(text, vision).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32",
        "text_config": text, "vision_config": vision, "use_unified_vision_chunk": True,
        "media_placeholder_token_id": VOCABULARY - 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "kimi_code.py").write_text(KIMI_CODE)
    tokenizer(path, media_token="<|media_pad|>")
    edit(
        path / "tokenizer_config.json",
        tokenizer_class="KimiTokenizer",
        auto_map={"AutoTokenizer": [None, "kimi_code.KimiTokenizer"]},
    )
    (path / "preprocessor_config.json").write_text(json.dumps(
        {"image_processor_type": "KimiProcessor", "auto_map": {"AutoImageProcessor": "kimi_code.KimiProcessor"}}
    ))  # fmt: skip


def kimi_vision_shapes(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of Kimi-K2.5's vision tower and projector, asked of vLLM's own modules."""
    import tempfile

    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.kimi_k25 import KimiK25MultiModalProjector
    from vllm.model_executor.models.kimi_k25_vit import MoonViT3dPretrainedModel
    from vllm.transformers_utils.configs.kimi_k25 import KimiK25Config

    config = KimiK25Config(text_config=text, vision_config=vision).vision_config
    with set_current_vllm_config(VllmConfig()), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}-init", 0, "gloo")
        initialize_model_parallel(1, 1)
        with torch.device("meta"):
            parts = {
                "vision_tower": MoonViT3dPretrainedModel(config, prefix="vision_tower"),
                "mm_projector": KimiK25MultiModalProjector(
                    config=config, use_data_parallel=False, prefix="mm_projector"
                ),
            }
    return {f"{part}.{name}": tuple(p.shape) for part, m in parts.items() for name, p in m.named_parameters()}


def quantized(scheme: str, only: str = "_proj.") -> Callable[[Path], None]:
    """Quantises the linear layers of a saved checkpoint; the reference has the rounded weights.

    int4: compressed-tensors, groups of 32, weights alone, packed, as in Kimi-K2.5. int8 and fp8: compressed-tensors, a scale
    a channel, and activations a token. gptq and awq: 4 bits in groups of 32, in the layouts of those two.
    """

    def finish(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        reference = path / "reference"
        reference.mkdir(exist_ok=True)
        source = reference if (reference / "model.safetensors").exists() else path
        if source is path:
            (reference / "config.json").write_text((path / "config.json").read_text())
        weights, rounded = load_file(path / "model.safetensors"), load_file(source / "model.safetensors")
        for name in [
            name for name in weights if only in name and name.endswith("_proj.weight") and "vision" not in name
        ]:
            stored, value = STORED[scheme](weights.pop(name).float())
            weights |= {name.removesuffix("weight") + key: tensor for key, tensor in stored.items()}
            rounded[name.removeprefix("language_model.")] = value
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        save_file(rounded, reference / "model.safetensors", metadata={"format": "pt"})
        ignored = (
            ["lm_head", "re:.*mlp.gate$"]
            if only == "_proj."
            else ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
        )
        whole_config = json.loads((path / "config.json").read_text())
        whole_config.get("text_config", whole_config)["quantization_config"] = quantization(scheme, ignored)
        (path / "config.json").write_text(json.dumps(whole_config, indent=1))

    return finish


def quantization(scheme: str, ignored: list[str]) -> dict[str, Any]:
    """What ``config.json`` says of it."""
    if scheme == "gptq":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
        }  # fmt: skip
    if scheme == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    bits, kind = int(scheme[-1]), "float" if scheme == "fp8" else "int"
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors", "ignore": ignored,
        "format": {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[scheme],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights, "input_activations": None if bits == 4 else activations,
        }},
    }  # fmt: skip


def _scaled(weight: Any, largest: float, group: int) -> tuple[Any, Any]:
    """Weights ``[out, groups, group]`` in steps, and a bfloat16 scale a group."""
    groups = weight.view(len(weight), -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    return groups / scale, scale


def _int4(weight: Any) -> tuple[dict[str, Any], Any]:
    import torch

    steps, scale = _scaled(weight, 7, 32)
    steps = steps.round().clamp(-8, 7)
    stored = {"weight_packed": _nibbles((steps + 8).view(weight.shape)), "weight_shape": torch.tensor(weight.shape)}
    return {**stored, "weight_scale": scale.squeeze(-1).bfloat16()}, (steps * scale).view(weight.shape)


def _int8(weight: Any) -> tuple[dict[str, Any], Any]:
    import torch

    steps, scale = _scaled(weight, 127, weight.shape[1])
    whole = steps.round().clamp(-128, 127)
    stored = {"weight": whole.view(weight.shape).to(torch.int8), "weight_scale": scale.squeeze(-1).bfloat16()}
    return stored, (whole * scale).view(weight.shape)


def _fp8(weight: Any) -> tuple[dict[str, Any], Any]:
    import torch

    steps, scale = _scaled(weight, 448, weight.shape[1])
    short = steps.clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = {"weight": short.view(weight.shape), "weight_scale": scale.squeeze(-1)}
    return stored, (short.float() * scale).view(weight.shape)


def _nibbles(values: Any, order: Sequence[int] = range(8)) -> Any:
    """Eight numbers from 0 to 15 along the last dimension in each int32, the first of ``order`` lowest."""
    import torch

    eight = values.view(*values.shape[:-1], -1, 8).to(torch.int64)
    word = sum(eight[..., place] << 4 * bit for bit, place in enumerate(order))
    return torch.where(word < 2**31, word, word - 2**32).to(torch.int32)


def _gptq(weight: Any) -> tuple[dict[str, Any], Any]:
    """``qweight [in / 8, out]``, scales ``[groups, out]``; a zero point of 8 is stored as 7."""
    import torch

    steps, scale = _scaled(weight, 7, 32)
    steps = steps.round().clamp(-8, 7)
    out, inside = weight.shape
    scales = scale.squeeze(-1).T.contiguous()
    return {
        "qweight": _nibbles((steps + 8).view(out, inside)).T.contiguous(),
        "qzeros": _nibbles(torch.full_like(scales, 7)),
        "scales": scales.half(),
        "g_idx": torch.arange(inside, dtype=torch.int32) // 32,
    }, (steps * scales.half().float().T[..., None]).view(out, inside)


def _awq(weight: Any) -> tuple[dict[str, Any], Any]:
    """``qweight [in, out / 8]`` in the order of its kernels, with zero points of its own a group."""
    import torch

    out, inside = weight.shape
    groups = weight.view(out, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    steps = (groups / scale + zero).round().clamp(0, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _nibbles(steps.view(out, inside).T.contiguous(), order),
        "qzeros": _nibbles(zero.squeeze(-1).T.contiguous(), order),
        "scales": scale.squeeze(-1).T.contiguous().half(),
    }, ((steps - zero) * scale).view(out, inside).to(torch.float32)


STORED: dict[str, Callable[[Any], tuple[dict[str, Any], Any]]] = {
    "int4": _int4, "int8": _int8, "fp8": _fp8, "gptq": _gptq, "awq": _awq,
}  # fmt: skip


def kimi_int4(path: Path) -> None:
    kimi(path)
    quantized("int4", "mlp.experts.")(path)


def rounded_activations(scheme: str) -> Callable[[Any], None]:
    """8 bit activations, one scale a token, before every linear layer of the decoder."""

    def shorten(_module: Any, args: Any) -> Any:
        import torch

        scale = args[0].abs().amax(-1, keepdim=True) / (127 if scheme == "int8" else 448)
        steps = args[0] / scale
        return ((steps.round() if scheme == "int8" else steps.to(torch.float8_e4m3fn).to(steps.dtype)) * scale,)

    def adapt(model: Any) -> None:
        for name, module in model.model.layers.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(shorten)

    return adapt


def scaled_queries(model: Any) -> None:
    """What ``llama_4_scaling`` does: queries grow with the position. Transformers' DeepSeek does not know it."""
    import torch

    def grow(_module: Any, _args: Any, output: Any) -> Any:
        positions = torch.arange(output.shape[1])
        scale = 1 + SCALING["beta"] * torch.log(
            1 + torch.floor(positions / SCALING["original_max_position_embeddings"])
        )
        return output * scale[None, :, None]

    for layer in model.model.layers:
        layer.self_attn.q_b_proj.register_forward_hook(grow)


GATED_DELTA = {"gdn_prefill_backend": "triton"}  # the default on a Hopper GPU is FlashInfer, another package
SCALING = {"original_max_position_embeddings": 32, "beta": 0.5}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
#: Heads as vLLM's MLA kernels know them.
FULL_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
V2 = {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
V3 = {
    **LATENT,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
KIMI = {**V3, "n_group": 1, "topk_group": 1, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
TIED = {**SIZES, "tie_word_embeddings": True}

NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128, "patch_size": 16,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2],
}  # fmt: skip
GEMMA_3 = {**TIED, "sliding_window": 64, "query_pre_attn_scalar": 32}
QWEN_IMAGES = {
    "image_token_id": VOCABULARY - 4, "video_token_id": VOCABULARY - 3,
    "vision_start_token_id": VOCABULARY - 2, "vision_end_token_id": VOCABULARY - 1,
}  # fmt: skip


def quantized_llama(scheme: str, title: str) -> Architecture:
    return Architecture(
        "llama",
        SIZES,
        "LlamaForCausalLM",
        dtype="float16" if scheme in ("gptq", "awq") else "bfloat16",
        finish=quantized(scheme),
        adapt=rounded_activations(scheme) if scheme.endswith("8") else None,
        name=f"LlamaForCausalLM, {title}",
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SIZES, "LlamaForCausalLM"),
    "llama-tied": Architecture(
        "llama", {**SIZES, "tie_word_embeddings": True}, "LlamaForCausalLM", name="LlamaForCausalLM, tied embeddings"
    ),
    "qwen2": Architecture("qwen2", SIZES, "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", SIZES, "Qwen3ForCausalLM"),
    "qwen3-moe": Architecture("qwen3_moe", {**SIZES, **MOE}, "Qwen3MoeForCausalLM"),
    "qwen3-moe-two-ranks": Architecture(
        "qwen3_moe",
        {**SIZES, **MOE},
        "Qwen3MoeForCausalLM",
        ranks=2,
        environment=TWO_RANKS,
        name="Qwen3MoeForCausalLM, two ranks",
    ),
    "qwen3-moe-expert-parallel": Architecture(
        "qwen3_moe",
        {**SIZES, **MOE},
        "Qwen3MoeForCausalLM",
        ranks=2,
        expert_parallel=True,
        environment=TWO_RANKS,
        name="Qwen3MoeForCausalLM, two ranks, expert parallel",
    ),
    "mistral": Architecture("mistral", {**SIZES, "sliding_window": 64}, "MistralForCausalLM"),
    "mixtral": Architecture("mixtral", {**SIZES, "num_local_experts": 4}, "MixtralForCausalLM"),
    "gemma": Architecture(
        "gemma",
        {**TIED, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
        "GemmaForCausalLM",
    ),
    "gemma-2": Architecture(
        "gemma2",
        {**TIED, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 64, "query_pre_attn_scalar": 32},
        "Gemma2ForCausalLM",
    ),
    "gemma-3-text": Architecture("gemma3_text", GEMMA_3, "Gemma3ForCausalLM"),
    "granite": Architecture(
        "granite",
        {
            **SIZES,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
        "GraniteForCausalLM",
    ),
    "phi-3": Architecture("phi3", {k: v for k, v in SIZES.items() if k != "head_dim"}, "Phi3ForCausalLM"),
    "olmo-2": Architecture("olmo2", SIZES, "Olmo2ForCausalLM"),
    "glm-4": Architecture("glm4", {**SIZES, "partial_rotary_factor": 0.5}, "Glm4ForCausalLM"),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
        "GptOssForCausalLM",
        dtype="bfloat16",
    ),
    "deepseek-v2": Architecture("deepseek_v2", V2, "DeepseekV2ForCausalLM", environment=MLA),
    "deepseek-v2-yarn": Architecture(
        "deepseek_v2",
        {**V2, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "DeepseekV2ForCausalLM",
        environment=MLA,
        name="DeepseekV2ForCausalLM, yarn",
    ),
    "deepseek-v2-mla": Architecture(
        "deepseek_v2",
        {**V2, **FULL_HEADS, "q_lora_rank": None},
        "DeepseekV2ForCausalLM",
        dtype="bfloat16",
        name="DeepseekV2ForCausalLM, MLA",
    ),
    "deepseek-v3-mla": Architecture(
        "deepseek_v3",
        {**V3, **FULL_HEADS},
        "DeepseekV3ForCausalLM",
        dtype="bfloat16",
        name="DeepseekV3ForCausalLM, MLA",
    ),
    "deepseek-v3": Architecture("deepseek_v3", V3, "DeepseekV3ForCausalLM", environment=MLA),
    "cohere": Architecture("cohere", TIED, "CohereForCausalLM"),
    "cohere-2": Architecture("cohere2", {**TIED, "sliding_window": 64}, "Cohere2ForCausalLM"),
    "stablelm": Architecture("stablelm", SIZES, "StableLmForCausalLM"),
    "exaone-4": Architecture(
        "exaone4", {**SIZES, "sliding_window": 64, "sliding_window_pattern": 4}, "Exaone4ForCausalLM"
    ),
    "phi-moe": Architecture(
        "phimoe",
        {**SIZES, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
        "PhimoeForCausalLM",
        architectures="PhiMoEForCausalLM",
    ),
    "llama-int4": quantized_llama("int4", "compressed-tensors INT4"),
    "llama-int8": quantized_llama("int8", "compressed-tensors W8A8"),
    "llama-fp8": quantized_llama("fp8", "compressed-tensors FP8"),
    "llama-gptq": quantized_llama("gptq", "GPTQ 4 bit"),
    "llama-awq": quantized_llama("awq", "AWQ 4 bit"),
    "kimi-k2.5-int4": Architecture(
        "deepseek_v3",
        KIMI,
        "DeepseekV3ForCausalLM",
        environment=MLA,
        dtype="bfloat16",
        finish=kimi_int4,
        name="KimiK25ForConditionalGeneration, INT4 experts",
    ),
    "kimi-k2": Architecture(
        "deepseek_v3",
        {**KIMI, "num_attention_heads": 8, "num_key_value_heads": 8},
        "DeepseekV3ForCausalLM",
        environment=MLA,
        name="Kimi-K2 (DeepseekV3ForCausalLM with yarn)",
    ),
    "kimi-k2.5": Architecture(
        "deepseek_v3",
        KIMI,
        "DeepseekV3ForCausalLM",
        environment=MLA,
        finish=kimi,
        name="KimiK25ForConditionalGeneration",
    ),
    "kimi-k2.5-mla": Architecture(
        "deepseek_v3",
        {**KIMI, **FULL_HEADS},
        "DeepseekV3ForCausalLM",
        dtype="bfloat16",
        finish=kimi,
        name="KimiK25ForConditionalGeneration, MLA",
    ),
    "llama-4-scaling": Architecture(
        "deepseek_v3",
        {**V3, "llama_4_scaling": SCALING},
        "DeepseekV3ForCausalLM",
        environment=MLA,
        adapt=scaled_queries,
        name="DeepseekV3ForCausalLM, llama_4_scaling",
    ),
    "deepseek-v3-float16": Architecture(
        "deepseek_v3",
        V3,
        "DeepseekV3ForCausalLM",
        environment=MLA,
        dtype="float16",
        finish=float16,
        name="DeepseekV3ForCausalLM, float16",
    ),
    "gemma-3": Architecture(
        "gemma3",
        {
            "text_config": GEMMA_3,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": VOCABULARY - 3,
            "eoi_token_index": VOCABULARY - 2,
            "image_token_index": VOCABULARY - 1,
        },
        "Gemma3ForConditionalGeneration",
        finish=gemma_processor,
    ),
    "gemma-3n-text": Architecture(
        "gemma3n_text",
        {
            **GEMMA_3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
        },
        "Gemma3nForCausalLM",
        finish=plain_names,
        told=False,
    ),
    "qwen3-vl": Architecture(
        "qwen3_vl",
        {
            "text_config": {
                **SIZES,
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True},
            },
            "vision_config": QWEN_VISION,
            **QWEN_IMAGES,
        },
        "Qwen3VLForConditionalGeneration",
        finish=qwen_processor,
    ),
    "qwen3-next": Architecture(
        "qwen3_next",
        {
            **SIZES,
            **MOE,
            "num_experts_per_tok": 8,  # all of them: rounding to bfloat16 would choose others
            "num_hidden_layers": 8,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "Qwen3NextForCausalLM",
        dtype="bfloat16",  # vLLM's chunked gated delta rule takes nothing else
        additional=GATED_DELTA,
    ),
    "qwen3.5": Architecture(
        "qwen3_5_text",
        {
            **SIZES,
            "num_hidden_layers": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "Qwen3_5ForCausalLM",
        dtype="bfloat16",  # vLLM's chunked gated delta rule takes nothing else
        additional=GATED_DELTA,
    ),
    "minimax": Architecture(
        "minimax",
        {**SIZES, "head_dim": 64, "num_local_experts": 4, "block_size": 32, "postnorm": True},
        "MiniMaxForCausalLM",
        finish=without_buffers,
    ),
    "qwen2-moe": Architecture(
        "qwen2_moe", {**NO_HEAD_DIM, **MOE, "shared_expert_intermediate_size": 64}, "Qwen2MoeForCausalLM"
    ),
    "smollm-3": Architecture("smollm3", NO_HEAD_DIM, "SmolLM3ForCausalLM"),
    "granite-4": Architecture(
        "granitemoehybrid",
        {
            **NO_HEAD_DIM,
            "layer_types": ["attention"] * 6,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 128,
            "num_local_experts": 4,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            **MAMBA,
        },
        "GraniteMoeHybridForCausalLM",
        name="GraniteMoeHybridForCausalLM, attention only",
    ),
    "granite-4-hybrid": Architecture(
        "granitemoehybrid",
        {
            **NO_HEAD_DIM,
            "layer_types": ["mamba", "mamba", "attention"] * 2,
            "shared_intermediate_size": 128,
            "num_local_experts": 4,
            **MAMBA,
        },
        "GraniteMoeHybridForCausalLM",
    ),
    "granite-moe": Architecture(
        "granitemoe", {**NO_HEAD_DIM, "num_local_experts": 4, "residual_multiplier": 0.22}, "GraniteMoeForCausalLM"
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {**SIZES, "use_qk_norm": True}, "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {
            **SIZES,
            "use_qk_norm": True,
            "num_experts": 4,
            "moe_topk": 2,
            "moe_intermediate_size": [256] * 6,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
        },
        "HunYuanMoEV1ForCausalLM",
    ),
    "glm": Architecture("glm", SIZES, "GlmForCausalLM"),
    "glm-4-moe": Architecture(
        "glm4_moe",
        {
            **SIZES,
            **MOE,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
        "Glm4MoeForCausalLM",
    ),
    "olmo": Architecture("olmo", {**NO_HEAD_DIM, "num_key_value_heads": 4}, "OlmoForCausalLM"),
    "olmo-3": Architecture("olmo3", {**NO_HEAD_DIM, "sliding_window": 64}, "Olmo3ForCausalLM"),
    "olmoe": Architecture("olmoe", {**NO_HEAD_DIM, "num_experts": 8, "num_experts_per_tok": 2}, "OlmoeForCausalLM"),
    "phi": Architecture("phi", {**NO_HEAD_DIM, "num_key_value_heads": 4, "intermediate_size": 512}, "PhiForCausalLM"),
    "starcoder-2": Architecture("starcoder2", {**NO_HEAD_DIM, "sliding_window": None}, "Starcoder2ForCausalLM"),
    "nemotron": Architecture("nemotron", SIZES, "NemotronForCausalLM"),
    "seed-oss": Architecture("seed_oss", SIZES, "SeedOssForCausalLM"),
    "ernie-4.5": Architecture("ernie4_5", SIZES, "Ernie4_5ForCausalLM"),
    "dots-1": Architecture(
        "dots1",
        {
            **SIZES,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        "Dots1ForCausalLM",
    ),
    "gpt-2": Architecture(
        "gpt2",
        {
            **TOKENS,
            "n_embd": 128,
            "n_layer": 6,
            "n_head": 4,
            "n_positions": 2048,
            "initializer_range": 0.08,
            "num_hidden_layers": 6,
        },
        "GPT2LMHeadModel",
    ),
    "gpt-neox": Architecture("gpt_neox", NO_HEAD_DIM, "GPTNeoXForCausalLM"),
    "falcon": Architecture(
        "falcon", {**NO_HEAD_DIM, "new_decoder_architecture": False, "alibi": False}, "FalconForCausalLM"
    ),
    "opt": Architecture(
        "opt",
        {
            **TOKENS,
            "hidden_size": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 128,
            "init_std": 0.08,
        },
        "OPTForCausalLM",
    ),
    "llama-4": Architecture(
        "llama4_text",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
        },
        "Llama4ForCausalLM",
    ),
    "falcon-h1": Architecture("falcon_h1", {**NO_HEAD_DIM, **MAMBA, "mamba_d_ssm": 256}, "FalconH1ForCausalLM"),
    "mamba-2": Architecture(
        "mamba2",
        {
            **TOKENS,
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 16,
            "chunk_size": 32,
        },
        "Mamba2ForCausalLM",
        told=False,
    ),
    "jamba": Architecture(
        "jamba",
        {
            **NO_HEAD_DIM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
        "JambaForCausalLM",
    ),
    "bamba": Architecture("bamba", {**NO_HEAD_DIM, **MAMBA, "attn_layer_indices": [1, 4]}, "BambaForCausalLM"),
    "lfm-2": Architecture(
        "lfm2",
        {
            **NO_HEAD_DIM,
            "layer_types": ["conv", "full_attention"] * 3,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
        },
        "Lfm2ForCausalLM",
    ),
    "longcat-flash": Architecture(
        "longcat_flash",
        {
            **LATENT,
            **FULL_HEADS,
            "num_layers": 3,
            "num_hidden_layers": 6,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
        "LongcatFlashForCausalLM",
        dtype="bfloat16",
    ),
}
