#!/usr/bin/env python3
"""What wrong rows do to a draft model: speculators' own EAGLE-3 trainer on rows that are right, and on damaged ones.

    python benchmarks/training.py talk MODEL WORK             # conversations: the target answers our questions
    python benchmarks/training.py extract MODEL WORK          # `spec-vllm-compat extract`
    python benchmarks/training.py train MODEL WORK --rows untrained right "chunk loss" --out training.json
    python benchmarks/training.py plot training.json --out docs/training.svg                  # needs matplotlib

Conversations are in conversations.py. Preprocessing, data set, sampler, model and trainer are those of the installed
speculators; what makes them run without a GPU changes what is computed by rounding only (:func:`without_gpu`): the trainer
is given the device "cpu" where it expects the index of a GPU; forward is not compiled (0.3.0 compiles it on any device) and
runs under autocast to bfloat16, for speed; attention is torch's scaled_dot_product_attention with speculators' own mask as a
matrix, because torch does not support training with flex_attention on the CPU. deepspeed is not needed.

Agreement is measured by this script, not by the trainer, on held-out conversations about other things: how often the
head's first token is the most probable one of the target (over the target's whole vocabulary, after the final norm), and
how many tokens in a row are, of the two that it drafts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import conversations

LAYERS = [2, 15, 27, 29]  # speculators' choice for 30 blocks: three layers of input, and the target
LONGEST = 256
PACK = 512  # tokens of one step
DRAFT_VOCABULARY = 2048
TTT_STEPS = 2  # tokens that the head drafts in training, and here in serving
SEED = 0


def make_data(model: str, work: Path, count: int, max_tokens: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = conversations.questions(count)
    talks = conversations.answer(model, train + held_out, max_tokens)
    conversations.write(work / "train.jsonl", talks[: len(train)])
    conversations.write(work / "held_out.jsonl", talks[len(train) :])


def extract(model: str, work: Path) -> None:
    for name, more in (("train", ["--token-freq-path", str(work / "token_freq.pt")]), ("held_out", [])):
        command = ["extract", "--model-path", model, "--prepared-data", str(work / f"{name}.jsonl")]
        command += ["--output-dir", str(work / f"rows-{name}"), "--layer-ids", *map(str, LAYERS), "--batch-size", "16"]
        command += ["--max-seq-len", str(LONGEST), "--gpu-memory-utilization", "0.3", *more]
        subprocess.run([sys.executable, "-m", "spec_vllm_compat", *command], check=True)


# -- damage, as the old faults did it ----------------------------------------------------------------------------------


def chunk_loss(samples: list[dict[str, Any]], call: int = 32, step: int = 1024) -> list[dict[str, Any]]:
    """speculators 0.3 on vLLM: a prompt that does not fit into a scheduler step loses its rest, the rows of a call are
    cut by offset all the same, so later sequences get rows of others and the last ones too few. Its steps hold 8,192
    tokens; here 1,024, for our sequences are short."""
    import torch

    damaged = []
    for begin in range(0, len(samples), call):
        group = samples[begin : begin + call]
        kept, used = [], 0
        for sample in group:
            length = len(sample["input_ids"])
            kept.append(min(length, step - used))
            used = (used + kept[-1]) % step
        layers = [
            torch.cat([sample["hidden_states"][layer][:rows] for sample, rows in zip(group, kept, strict=True)])
            for layer in range(len(LAYERS))
        ]
        offset = 0
        for sample in group:
            length = len(sample["input_ids"])
            damaged.append({**sample, "hidden_states": [rows[offset : offset + length].clone() for rows in layers]})
            offset += length
    return damaged


def string_order(samples: list[dict[str, Any]], call: int = 32) -> list[dict[str, Any]]:
    """speculators 0.4: results come in the string order of request ids, so from 11 sequences a call on tokens and rows
    of one sample are saved with the loss mask of another, of another length."""
    damaged = []
    for begin in range(0, len(samples), call):
        group = samples[begin : begin + call]
        order = sorted(range(len(group)), key=str)
        damaged += [
            {**group[found], "loss_mask": asked["loss_mask"]} for asked, found in zip(group, order, strict=True)
        ]
    return damaged


def string_order_of_rows(samples: list[dict[str, Any]], call: int = 32) -> list[dict[str, Any]]:
    """The same, saved by a script that keeps its own tokens: rows of one sample under tokens and mask of another."""
    damaged = string_order(samples, call)
    return [{**right, "hidden_states": wrong["hidden_states"]} for right, wrong in zip(samples, damaged, strict=True)]


def one_layer(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every layer holds the rows of the first: what a repair that takes the worker's reply apart once too often gives,
    once its shapes have been made to fit."""
    return [{**sample, "hidden_states": [sample["hidden_states"][0]] * len(LAYERS)} for sample in samples]


DAMAGE = {
    "chunk loss": chunk_loss,
    "string order": string_order,
    "string order, own tokens": string_order_of_rows,
    "one layer": one_layer,
}


def rows_of(work: Path, kind: str) -> Path:
    """The folder of a variant; damaged ones are made from the right one."""
    import torch

    right, folder = work / "rows-train", work / f"rows-{kind.replace(', ', '-').replace(' ', '-')}"
    if kind not in DAMAGE:
        return right
    if not folder.exists():
        files = sorted(right.rglob("data_*.pt"), key=lambda path: int(path.stem[5:]))
        damaged = DAMAGE[kind]([torch.load(path, weights_only=True) for path in files])
        (folder / "part").mkdir(parents=True)
        for path, sample in zip(files, damaged, strict=True):
            torch.save(sample, folder / "part" / path.name)
        lengths = {path.stem[5:]: len(sample["input_ids"]) for path, sample in zip(files, damaged, strict=True)}
        (folder / "part" / "sample_lengths.json").write_text(json.dumps(lengths))
    return folder


# -- speculators' trainer ----------------------------------------------------------------------------------------------


def without_gpu() -> None:
    """Make speculators' EAGLE-3 model trainable on a CPU."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, attention
    from torch.nn.attention.flex_attention import create_mask

    def dense(_module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        allowed = create_mask(mask.mask_mod, None, None, query.shape[2], key.shape[2], device="cpu")
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None

    attention.ALL_ATTENTION_FUNCTIONS.register("simple_flex_attention", dense)
    forward = getattr(Eagle3DraftModel.forward, "_torchdynamo_orig_callable", Eagle3DraftModel.forward)

    def in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    Eagle3DraftModel.forward = in_bfloat16


def compare_attention() -> float:
    """Largest difference between the attention of :func:`without_gpu` and speculators' own, over random packed input."""
    import torch
    from speculators.models.eagle3 import attention
    from torch.nn.attention.flex_attention import create_block_mask

    torch.manual_seed(SEED)
    lengths, worst = torch.tensor([100, 60, 90]), 0.0
    mask_mod = attention.create_combined_mask_mod(lengths, 256)
    mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    keys = torch.randn(2, 1, 3, 256, 64)
    for _ in range(TTT_STEPS):
        inputs = torch.randn(1, 9, 256, 64), *keys, mask
        with torch.no_grad():
            theirs, _ = attention.flex_attention_forward(None, *inputs)
            ours, _ = attention.ALL_ATTENTION_FUNCTIONS["simple_flex_attention"](None, *inputs)
        worst = max(worst, float((theirs - ours)[:, : int(lengths.sum())].abs().max()))
        mask = attention.extend_mask_for_draft_tokens(mask)
        keys = torch.cat([keys, torch.randn(2, 1, 3, 256, 64)], dim=3)
    return worst


def build_head(model: str, work: Path) -> Any:
    """An untrained head, as speculators' training script builds it: one Llama layer of the target's shape."""
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
    from transformers import AutoConfig, LlamaConfig

    target = AutoConfig.from_pretrained(model)
    same = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads hidden_act rope_theta"
    same += " max_position_embeddings initializer_range rms_norm_eps head_dim"
    layer = LlamaConfig(**{key: getattr(target, key) for key in same.split()}, num_hidden_layers=1, pad_token_id=None)
    layer._attn_implementation = "simple_flex_attention"
    frequencies = torch.load(work / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, DRAFT_VOCABULARY, target.vocab_size)
    verifier = VerifierConfig.from_config(target, name_or_path=model)
    proposal = GreedyTokenProposalConfig(speculative_tokens=TTT_STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )
    torch.manual_seed(SEED)
    return Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t)


def final_norm(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="float32").model.norm.requires_grad_(False)


def with_final_norm(model: str) -> Any:
    """For speculators 0.3, whose trainer puts the LM head on rows before the final norm: its data set takes a function
    that arranges a sample, and that is where the norm can be applied."""
    from speculators.train.data import standardize_data_v1

    norm = final_norm(model)

    def standardize(sample: dict[str, Any]) -> dict[str, Any]:
        arranged = standardize_data_v1(sample)
        arranged["verifier_last_hidden_states"] = norm(arranged["verifier_last_hidden_states"].float())
        return arranged

    return standardize


class HeldOut:
    """Held-out conversations with the most probable next token of the target at every position."""

    def __init__(self, model: str, work: Path) -> None:
        import torch
        from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
        from transformers import AutoModelForCausalLM

        self.collate = create_collate_fn(LONGEST)
        files = sorted((work / "rows-held_out").rglob("data_*.pt"))
        self.samples = list(Eagle3SampleFileDataset(max_len=LONGEST, file_list=[str(path) for path in files]))
        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            states = [sample["verifier_last_hidden_states"] for sample in self.samples]
            self.top = [target.lm_head(target.model.norm(rows)).argmax(-1) for rows in states]
            self.top_without_norm = [target.lm_head(rows).argmax(-1) for rows in states]
        self.masks = [sample["loss_mask"].bool() for sample in self.samples]

    def facts(self, head: Any) -> dict[str, Any]:
        import torch

        mask, top = torch.cat(self.masks), torch.cat(self.top)
        return {
            "positions": int(mask.sum()),
            "top_token_in_draft_vocabulary": round(float(head.t2d[top[mask]].float().mean()), 4),
            "same_top_token_without_final_norm": round(
                float((torch.cat(self.top_without_norm) == top)[mask].float().mean()), 4
            ),
        }

    def agreement(self, head: Any) -> dict[str, float]:
        """Share of positions whose first drafted token is the target's, and drafted tokens in a row that are."""
        import torch

        head.eval()
        first = in_a_row = places = 0
        with torch.no_grad():
            for sample, top, mask in zip(self.samples, self.top, self.masks, strict=True):
                batch = self.collate([sample])
                for key in ("verifier_last_hidden_states", "loss_mask"):
                    del batch[key]
                drafted = head(**batch, ttt_steps=TTT_STEPS)
                whole = len(top) - TTT_STEPS + 1  # positions that have a target for every drafted token
                right = torch.ones(whole, dtype=torch.bool)
                for step, draft_ids in enumerate(drafted):
                    tokens = (draft_ids + head.d2t[draft_ids])[0, :whole]
                    right &= (tokens == top[step : step + whole]) & mask[step : step + whole]
                    in_a_row += int(right[mask[:whole]].sum())
                    first += int(right[mask[:whole]].sum()) if step == 0 else 0
                places += int(mask[:whole].sum())
        return {"top1": round(first / places, 4), "tokens_in_a_row": round(in_a_row / places, 4)}


def train(model: str, work: Path, kind: str, held_out: HeldOut, epochs: int, lr: float) -> dict[str, Any]:
    import torch
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from speculators.train.trainer import Trainer, TrainerConfig

    head = build_head(model, work)
    more = {"standardize_fn": with_final_norm(model)} if kind == "right, final norm" else {}
    files = sorted(rows_of(work, kind).rglob("data_*.pt"))
    data = Eagle3SampleFileDataset(
        max_len=PACK, file_list=[str(path) for path in files], transform=AddUniformNoise(std=0.05), **more
    )
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=PACK, lengths=data.approx_lengths, num_replicas=1, rank=0, seed=SEED
    )
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=create_collate_fn(PACK))
    losses: list[float] = []
    epoch_ends: list[dict[str, Any]] = [{"step": 0, **held_out.agreement(head)}]
    print(kind, epoch_ends[-1], held_out.facts(head), flush=True)

    class Recorded(Trainer):
        def val_epoch(self, epoch: int) -> None:  # noqa: ARG002
            epoch_ends.append({"step": self.global_step, **held_out.agreement(self.model)})
            print(kind, epoch_ends[-1], f"loss {losses[-1]:.3f}", f"{time.monotonic() - started:.0f} s", flush=True)

        def save_checkpoint(self, epoch: int) -> None:
            if epoch == epochs - 1:
                super().save_checkpoint(epoch)

    class Listener:
        def __call__(self, record: Any) -> bool:
            if isinstance(record.msg, dict) and "train" in record.msg:
                losses.append(round(record.msg["train"]["loss"], 4))
            return True

    import logging

    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.filters = [Listener()]
    name = f"head-{version()}-{kind.replace(', ', '-').replace(' ', '-')}"
    shutil.rmtree(work / name, ignore_errors=True)
    if kind == "untrained":
        print("attention differs by", difference := compare_attention())
        head.save_pretrained(work / name / "0")
        return {"losses": [], "epochs": epoch_ends, "attention_differs_by": difference, **held_out.facts(head)}
    config = TrainerConfig(
        lr=lr,
        num_epochs=epochs,
        save_path=str(work / name),
        local_rank="cpu",  # type: ignore[arg-type]
        train_call_kwargs={"ttt_steps": TTT_STEPS, "use_off_policy_tokens": False},
    )
    torch.manual_seed(SEED)
    started = time.monotonic()
    Recorded(model=head, config=config, train_loader=loader, val_loader=loader).run_training()
    tokens = sum(data.approx_lengths)
    return {
        "samples": len(data),
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
        "losses": losses,
        "epochs": epoch_ends,
        **held_out.facts(head),
    }


def version() -> str:
    from importlib.metadata import version

    return version("speculators")


def plot(results: list[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "training", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, (loss, agreement) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for path in results:
        for kind, variant in json.loads(path.read_text())["variants"].items():
            if not variant["losses"]:
                continue
            label = f"{kind} ({path.stem.removeprefix('training-speculators-')})"
            smooth, value = [], variant["losses"][0]
            for found in variant["losses"]:
                value = 0.9 * value + 0.1 * found
                smooth.append(value)
            (line,) = loss.plot(range(1, len(smooth) + 1), smooth, label=label)
            steps = [end["step"] for end in variant["epochs"]]
            agreement.plot(steps, [end["top1"] for end in variant["epochs"]], marker=".", color=line.get_color())
    loss.set(yscale="log", xlabel="step", ylabel=f"training loss, {TTT_STEPS} drafted tokens (smoothed)")
    agreement.set(ylim=(0, 1), xlabel="step", ylabel="held-out agreement, first drafted token")
    loss.legend(fontsize=7)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("talk", "extract", "train"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument("work", type=Path)
        if name == "talk":
            command.add_argument("--conversations", type=int, default=240)
            command.add_argument("--max-tokens", type=int, default=40)
    command.add_argument(
        "--rows", nargs="+", choices=["untrained", "right", "right, final norm", *DAMAGE], required=True
    )
    command.add_argument("--epochs", type=int, default=3)
    command.add_argument("--lr", type=float, default=1e-3)
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("plot")
    command.add_argument("results", type=Path, nargs="+")
    command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "talk":
        make_data(options.model, options.work, options.conversations, options.max_tokens)
    elif options.command == "extract":
        extract(options.model, options.work)
    elif options.command == "plot":
        plot(options.results, options.out)
    else:
        without_gpu()
        held_out = HeldOut(options.model, options.work)
        for kind in options.rows:
            result = train(options.model, options.work, kind, held_out, options.epochs, options.lr)
            whole = json.loads(options.out.read_text()) if options.out.exists() else {"variants": {}}
            whole |= {"speculators": version(), "layers": LAYERS, "draft_vocabulary": DRAFT_VOCABULARY}
            whole |= {"lr": options.lr, "tokens_drafted": TTT_STEPS, "tokens_a_step": PACK}
            whole["variants"][kind] = result
            options.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
