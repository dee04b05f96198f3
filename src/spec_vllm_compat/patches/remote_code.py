"""Configurations and tokenizers whose code comes with the checkpoint or with vLLM."""

from __future__ import annotations

from typing import Any

from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.remote_code import trusted
from spec_vllm_compat.seams import Change, Keyword, Name, PatchSet, Probe, Target

RECORD = Record(
    id="remote_code",
    kind=Kind.CORRECTNESS,
    why=(
        "speculators trusts a checkpoint's own code for configuration and weights, without a way to say no, but not for the "
        "tokenizer: Kimi's fails with «please pass the argument `trust_remote_code=True`». It asks Transformers for the "
        "configuration, which does not know every class that vLLM ships: «model type `kimi_k25` but Transformers does not "
        "recognize this architecture». And it finds the number of layers only at the top or in `text_config`. Now vLLM "
        "reads the configuration, its own language part gives the layers, and one setting, "
        "`SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE`, holds for configuration, tokenizer and model. Where vLLM itself trusts code "
        "unasked it cannot help: Kimi-K2.5's class does so for the image processor."
    ),
    changed="faults of speculators' own, on every vLLM",
    source="speculators 0.3.0 vllm_hidden_states_generator.py, lines 80 to 90 and 174; vllm/transformers_utils/config.py",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="whether the generator module binds AutoConfig and AutoTokenizer",
    remove_when="never while speculators' in-process generator is supported",
)


class LanguageConfig:
    """In place of ``AutoConfig``: the language model's part of the configuration, as vLLM reads it."""

    @staticmethod
    def from_pretrained(path: str, **_keywords: Any) -> Any:
        from vllm.transformers_utils.config import get_config, get_hf_text_config

        return get_hf_text_config(get_config(path, trust_remote_code=trusted()))


def _tokenizers(target: Target) -> Any:
    original = target.bound("AutoTokenizer")

    class Tokenizers:
        """In place of ``AutoTokenizer``."""

        @staticmethod
        def from_pretrained(path: str, **keywords: Any) -> Any:
            return original.from_pretrained(path, **{**keywords, "trust_remote_code": trusted()})

    return Tokenizers


def _probe(target: Target) -> Probe:
    target.bound("AutoConfig"), target.bound("AutoTokenizer")
    return Probe(True, f"a checkpoint's own code is {'trusted' if trusted() else 'not trusted'}")


def _trust(_target: Target, keywords: dict[str, Any]) -> None:
    keywords["trust_remote_code"] = trusted()


def _changes(_target: Target) -> tuple[Change, ...]:
    return (
        Name("AutoConfig", lambda _target: LanguageConfig),
        Name("AutoTokenizer", _tokenizers),
        Keyword("ModelConfig", "trust_remote_code", _trust),
    )


PATCH_SET = PatchSet(RECORD, _probe, _changes)
