"""Multi-head latent attention (MLA) with experts on a GPU: rows of DeepSeek-V3 and Kimi-K2.5 shapes against Transformers.

    python benchmarks/mla.py OUT.json --shape kimi_k25 --engines FLASH_ATTN_MLA/V1/1 FLASHMLA/V1/1 FLASH_ATTN_MLA/V2/2

An engine is attention backend / model runner / tensor parallel size; backend `off` is `VLLM_MLA_DISABLE=1`. Heads have the
full size (192 for queries and keys, 128 for values, 512 latent), widths are small. Prompts lie on both sides of the numbers of
tokens up to which vLLM's MLA backends take a prompt as decoding (FlashMLA 128, FlashAttention 512), and go over several steps.

MLA runs in bfloat16 only, so the bound is a measured one: Transformers' own bfloat16 error against its float32 rows from the
same weights. A choice of other experts by rounding would be no fault but would hide one, so the weights are made such that
the choice depends on the token alone: the router reads eight channels that only the embedding writes. The text part of
Kimi-K2.5 is a DeepSeek-V3, which Transformers knows; its vision tower is built and loaded, prompts are text.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import spec_vllm_compat  # noqa: I001 - before speculators
import torch
from speculators.data_generation import vllm_hidden_states_generator as module
from tensor_parallel import COMMON, batch, compiled, worst

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 8  # channels that the router reads
INT4_GROUP = 32
# FlashMLA takes prompts as decoding only if they are of one length, hence the second batch.
LENGTHS = [[511, 17, 128, 3000, 129, 1, 512, 127, 513, 3900, 2, 1000, 300], [128, 128, 3000, 128, 129, 128]]
TEXT: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "initializer_range": 0.03,
}
KIMI = {
    **TEXT,
    "num_hidden_layers": 61,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "deepseek_v3": ({**TEXT, "num_experts_per_tok": 6, "n_group": 4, "topk_group": 2}, [5, 0, 2, 7]),
    "kimi_k25": (KIMI, [2, 30, 58, 60]),
    "kimi_k25_int4": (KIMI, [2, 30, 58, 60]),
}
VISION = {
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
}
# What Kimi-K2.5's checkpoint brings as code of its own, as far as it is needed here.
CONFIGURATION = """
from transformers import DeepseekV3Config, PretrainedConfig
class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"
    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**kwargs)
"""
IMAGES = """
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
class KimiK25VisionProcessor(BaseImageProcessor):
    num_frames_per_chunk = 4
    def media_tokens_calculator(self, media):
        return 4
    def preprocess(self, medias, return_tensors=None, **kwargs):
        frames = [4 if media["type"] == "video_chunk" else 1 for media in medias]
        return BatchFeature(
            {"pixel_values": torch.zeros(16 * sum(frames), 3, 14, 14), "grid_thws": torch.tensor([[n, 4, 4] for n in frames])}
        )
"""


def plant_routing(model: Any, config: Any) -> None:
    """Make the choice of experts depend on the token alone, with margins far above rounding."""
    generator = torch.Generator().manual_seed(5)
    groups, experts = config.n_group, config.n_routed_experts
    size = experts // groups
    embedding = model.model.embed_tokens.weight
    embedding.normal_()
    embedding[:, :CLASSES] = 0
    tokens = torch.arange(len(embedding), device=embedding.device)
    embedding[tokens, tokens % CLASSES] = 8.0
    for name, module_ in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module_.weight[:CLASSES] = 0  # nothing but the embedding writes these channels
        if name.endswith("mlp.gate"):
            levels = torch.empty(CLASSES, experts)
            for row in levels:
                base = 0.3 * (torch.randperm(groups, generator=generator) - (groups - 1) / 2)
                for group in range(groups):
                    row[group * size : (group + 1) * size] = base[group] + 0.07 * (
                        torch.randperm(size, generator=generator) - (size - 1) / 2
                    )
            module_.weight.zero_()
            module_.weight[:, :CLASSES] = levels.T.to(module_.weight)
            bias = module_.e_score_correction_bias
            bias.copy_(0.002 * torch.randn(experts, generator=generator).to(bias))


def int4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight ``[out, in]`` as compressed-tensors stores it in 4 bits (symmetric, groups of 32), and what that stands for."""
    grouped = weight.float().unflatten(1, (-1, INT4_GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-6).bfloat16()
    steps = (grouped / scale.float()).round().clamp(-8, 7)
    nibbles = (steps.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    packed = (nibbles.long() << shifts).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    return tensors, (steps * scale.float()).flatten(1)


def vision_weights(hidden: int) -> dict[str, torch.Tensor]:
    width, inner, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (VISION["init_pos_emb_height"], VISION["init_pos_emb_width"], width),
        "mm_projector.linear_1.weight": (4 * width, 4 * width),
        "mm_projector.linear_1.bias": (4 * width,),
        "mm_projector.linear_2.weight": (hidden, 4 * width),
        "mm_projector.linear_2.bias": (hidden,),
    }
    for name in ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for layer in range(VISION["num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{layer}"
        for name, (rows, columns) in {
            "mlp.fc0": (inner, width),
            "mlp.fc1": (width, inner),
            "wqkv": (3 * width, width),
            "wo": (width, width),
        }.items():
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
        for norm in ("norm0", "norm1"):
            shapes |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
    return {name: 0.02 * torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def checkpoint(shape: str, folder: Path, layers: int | None) -> Any:
    """Write the checkpoint; returns the text model, float32, on the device."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    keywords = SHAPES[shape][0]
    if layers is not None:
        keywords = {**keywords, "num_hidden_layers": layers}
    config = AutoConfig.for_model("deepseek_v3", **keywords)
    config._attn_implementation = "eager"
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        plant_routing(model, config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    text = config.to_dict()
    text["torch_dtype"] = "bfloat16"
    if shape.endswith("int4"):
        for name in [name for name in weights if re.search(r"\.experts\.\d+\.\w+_proj\.weight$", name)]:
            tensors, exact = int4(weights[name])
            model.get_parameter(name).data = exact  # float32: the product of a 4-bit step and a bfloat16 scale
            del weights[name]
            weights |= {name.removesuffix("weight") + part: tensor for part, tensor in tensors.items()}
        text["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": INT4_GROUP,
                        "dynamic": False,
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        }
    if shape.startswith("kimi"):
        weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
        weights |= vision_weights(config.hidden_size)
        written = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
            "media_placeholder_token_id": 5,
            "use_unified_vision_chunk": True,
            "torch_dtype": "bfloat16",
            "text_config": text,
            "vision_config": {"model_type": "kimi_k25_vision", **VISION},
        }
        (folder / "configuration_kimi_k25.py").write_text(CONFIGURATION)
        (folder / "kimi_k25_vision_processing.py").write_text(IMAGES)
        processor = {"auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        written = {**text, "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(written))
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    vocabulary = {f"t{i}": i for i in range(COMMON["vocab_size"])}
    vocabulary["<|media_pad|>"] = vocabulary.pop("t5")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", unk_token="t2").save_pretrained(folder)
    return model.float()


@torch.no_grad()
def rows_of_transformers(model: Any, prompts: list[list[int]], layers: list[int]) -> list[dict]:
    """Outputs of the decoder layers, by hooks, in float32 on the host."""
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int, output: Any) -> None:
        kept[layer] = (output[0] if isinstance(output, tuple) else output)[0].float().cpu()

    handles = [
        model.model.layers[layer].register_forward_hook(lambda _m, _a, output, layer=layer: keep(layer, output))
        for layer in layers
    ]
    results = []
    for prompt in prompts:
        model.model(torch.tensor([prompt], device=DEVICE), use_cache=False)
        results.append({"hidden_states": [kept[layer] for layer in layers]})
    for handle in handles:
        handle.remove()
    return results


def build(path: Path, layers: list[int], backend: str, tp: int) -> Any:
    original = module.VllmConfig

    def with_backend(**keywords: Any) -> Any:
        from vllm.config import AttentionConfig
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return original(attention_config=AttentionConfig(backend=AttentionBackendEnum[backend]), **keywords)

    if backend not in ("off", "auto"):
        module.VllmConfig = with_backend
    try:
        return module.VllmHiddenStatesGenerator(
            str(path), layer_ids=layers, max_model_len=4096, gpu_memory_utilization=0.25, tensor_parallel_size=tp
        )
    finally:
        module.VllmConfig = original


def watch(_worker: Any) -> None:
    """Note how many sequences of each step MLA takes as decoding and as prefill."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    original = MLACommonMetadataBuilder.build

    def build(self: Any, *args: Any, **keywords: Any) -> Any:
        built = original(self, *args, **keywords)
        context = bool(built.prefill is not None and built.prefill.chunked_context is not None)
        MLACommonMetadataBuilder.seen.append(
            (type(self).__name__, self.reorder_batch_threshold, built.num_decodes, built.num_prefills, context)
        )
        return built

    MLACommonMetadataBuilder.seen = []
    MLACommonMetadataBuilder.build = build


def watched(_worker: Any) -> list[tuple]:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    return MLACommonMetadataBuilder.seen


def one_engine(
    path: Path, layers: list[int], engine: str, batches: list[list[list[int]]], want: list[dict], own: float
) -> dict[str, Any]:
    backend, runner, tp = engine.split("/")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    os.environ["VLLM_MLA_DISABLE"] = "1" if backend == "off" else "0"
    begin = time.monotonic()
    generator = build(path, layers, backend, int(tp))
    started = time.monotonic() - begin
    try:
        if backend != "off":
            generator.executor.collective_rpc(watch)
        got = [result for prompts in batches for result in generator.generate(prompts)]
        seen = generator.executor.collective_rpc(watched)[0] if backend != "off" else []
        alone = [generator.generate([prompt])[0] for prompts in batches for prompt in prompts]
        backwards = [result for prompts in batches for result in generator.generate(prompts[::-1])[::-1]]
        identities = generator.executor.session.ask(generator.executor, "identify")
        error, wrong = worst(got, want), worst_of_another_layer(got, want)
        report = {
            "worst_row_error": error,
            "worst_row_error_one_at_a_time": worst(alone, want),
            "batch_against_one_at_a_time": worst(got, alone),
            "batch_against_its_reverse": worst(got, backwards),
            "error_of_another_layer": wrong,
            "lengths_with_wrong_rows": [
                len(there["hidden_states"][0])
                for here, there in zip(got, want, strict=True)
                if worst([here], [there]) > 1.5 * own
            ],
            "model_runners": [identity.model_runner for identity in identities],
            "container": generator.executor.session.capturing.container,
            "mla_steps": seen,
            "compiled": generator.executor.collective_rpc(compiled)[0],
            "seconds_to_start": round(started, 1),
        }
        both = (
            backend == "off"
            or any(decodes and prefills for _, _, decodes, prefills, _ in seen)
            or backend == "TRITON_MLA"
        )
        report["right"] = (
            max(error, report["worst_row_error_one_at_a_time"], worst(backwards, want)) < 1.5 * own
            and 3 * own < wrong
            and report["model_runners"] == [runner] * int(tp)
            and both
        )
        return report
    finally:
        generator.executor.shutdown()


def worst_of_another_layer(got: list[dict], want: list[dict]) -> float:
    """Smallest, over layers, of the worst error when that layer's rows stand for the next one asked for."""
    count = len(want[0]["hidden_states"])
    return min(
        worst(
            [{"hidden_states": [r["hidden_states"][i].float()]} for r in got],
            [{"hidden_states": [r["hidden_states"][(i + 1) % count]]} for r in want],
            shift=0,
        )
        for i in range(count)
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--engines", nargs="+", required=True, metavar="BACKEND/RUNNER/TP")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the shape has, for a try")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the prompts of one batch, for a try")
    options = parser.parse_args()
    lengths = [options.lengths] if options.lengths else LENGTHS
    layers = SHAPES[options.shape][1]
    if options.num_layers is not None:
        layers = sorted({min(layer, options.num_layers - 1) for layer in layers})
    batches = [batch(*some) for some in lengths]
    prompts = [prompt for some in batches for prompt in some]
    report: dict[str, Any] = {
        "versions": {v.module: v.text for v in spec_vllm_compat.report().versions},
        "device": torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu",
        "shape": options.shape,
        "layers": layers,
        "lengths": lengths,
        "engines": {},
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        begin = time.monotonic()
        model = checkpoint(options.shape, Path(folder), options.num_layers)
        want = rows_of_transformers(model, prompts, layers)
        # The same weights in bfloat16: what rounding costs in another implementation.
        own = rows_of_transformers(model.bfloat16(), prompts, layers)
        del model
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        bound = worst(own, want)
        report["transformers_bfloat16_error"] = bound
        report["transformers_bfloat16_error_by_layer"] = [
            worst(
                [{"hidden_states": [r["hidden_states"][i]]} for r in own],
                [{"hidden_states": [r["hidden_states"][i]]} for r in want],
            )
            for i in range(len(layers))
        ]
        report["row_norms"] = [float(want[-1]["hidden_states"][i].norm(dim=-1).mean()) for i in range(len(layers))]
        print(f"reference in {time.monotonic() - begin:.1f} s: bfloat16 error {bound}", flush=True)
        for engine in options.engines:
            begin = time.monotonic()
            try:
                done = one_engine(Path(folder), layers, engine, batches, want, bound)
            except Exception as error:  # noqa: BLE001 - the other engines still run; the report says what failed
                traceback.print_exc()
                done = {"right": False, "failed": f"{type(error).__name__}: {error}"[-1500:]}
            done["seconds"] = round(time.monotonic() - begin, 1)
            report["engines"][engine] = done
            print(engine, json.dumps(done), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(done["right"] for done in report["engines"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
