"""A request that begins with a single token goes on from another request's recurrent state."""

from __future__ import annotations

from spec_vllm_compat.records import Kind, Process, Record
from spec_vllm_compat.seams import Change, PatchSet, Probe, Target

RECORD = Record(
    id="recurrent_state",
    kind=Kind.CORRECTNESS,
    why=(
        "In models with Mamba, gated delta (Qwen3-Next, Qwen3.5), linear attention (MiniMax) or short convolution layers, a "
        "prompt of one token, or one of which a step has room for one token only, is taken as decoding, which goes on from "
        "the state in its block: that of the request that had it before. The rows of the whole prompt are wrong, without an "
        "error, as soon as blocks are used again. The worker sets those states to zero before the step."
    ),
    changed=(
        "vLLM takes such a request as a prefill since 0.19 for Mamba and since 0.31 for gated delta layers; for linear "
        "attention and short convolution not yet in 0.32."
    ),
    source=(
        "`split_decodes_and_prefills(treat_short_extends_as_decodes=)` in vllm/v1/attention/backends/mamba_attn.py (0.19.0), "
        "gdn_attn.py (0.31.0); linear_attn.py and short_conv_attn.py in 0.32.0 leave it out"
    ),
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="the worker looks for layers that keep a state (`MambaBase`)",
    remove_when="every backend with a state takes a request's first tokens as a prefill, in the oldest supported vLLM",
    process=Process.WORKER,
)


def _probe(_target: Target) -> Probe:
    return Probe(True, "the worker clears the state of a request that begins with one token")


def _changes(_target: Target) -> tuple[Change, ...]:
    return ()  # worker/recurrent.py does it


PATCH_SET = PatchSet(RECORD, _probe, _changes)
