"""What the configuration of a target model tells before it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_vllm_compat.errors import CompatError


@dataclass(frozen=True)
class TargetModel:
    """Facts that every command needs. ``folder`` is None where MODEL is only a configuration."""

    path: str
    folder: Path | None
    config: dict[str, Any]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    dtype: str

    def layer_ids(self, asked: tuple[int, ...]) -> list[int]:
        """The layers to extract: those asked for, or speculators' own choice.

        Raises CompatError where a layer does not exist or speculators' choice makes no sense for so few layers.
        """
        layers = list(asked) or [2, self.num_layers // 2, self.num_layers - 3, self.num_layers - 1]
        wrong = [layer for layer in layers if not 0 <= layer < self.num_layers]
        if wrong:
            raise CompatError(f"layer {wrong[0]} does not exist: {self.path} has layers 0 to {self.num_layers - 1}")
        if not asked and len(set(layers)) != len(layers):
            raise CompatError(f"speculators' choice for {self.num_layers} layers is {layers}; pass --layer-ids")
        return layers

    def fingerprint(self) -> str:
        """Hash over the configuration and the names, sizes and heads of the weight files; not over all weights."""
        digest = hashlib.sha256()
        for file in sorted(self.folder.iterdir()) if self.folder else ():
            if file.name == "config.json" or file.suffix in (".safetensors", ".bin", ".gguf"):
                digest.update(f"{file.name} {file.stat().st_size}".encode())
                with file.open("rb") as content:
                    digest.update(content.read(65536))
        return digest.hexdigest()


def read_target(path: str, *, trust_remote_code: bool = False) -> TargetModel:
    """The facts of a model: a folder, a ``config.json``, or a model in the hub's cache.

    Raises CompatError where there is none, or where it brings its own code and is not trusted.
    """
    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    try:
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "config.json"))  # asks the hub only where that is allowed
        config = json.loads(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - whatever the hub or the file says, there is no configuration
        hint = "" if "HF_HUB_OFFLINE" in os.environ else " Without a network, HF_HUB_OFFLINE=1 saves the hub's retries."
        raise CompatError(
            f"{path}: expected a folder with config.json, a configuration, or a model in the hub's cache; found none "
            f"({type(error).__name__}: {str(error).splitlines()[0]:.100}).{hint}"
        ) from None
    if "auto_map" in config and not trust_remote_code:
        raise CompatError(f"{path} brings its own Python code; read it, then pass --trust-remote-code")
    text = text_part(config)
    if not {"num_hidden_layers", "hidden_size", "vocab_size"} <= set(text):  # it leaves its type's defaults out
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config().to_dict()
    named = (part.get(name) for part in (text, config) for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, named), "bfloat16"))
    return TargetModel(
        path=path,
        folder=file.parent if file.name == "config.json" else None,
        config=config,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_length=text.get("max_position_embeddings"),
        dtype="bfloat16" if dtype == "float32" else dtype,  # what vLLM's dtype="auto" makes of it
    )


def random_model(path: str, architecture: str, *, trust_remote_code: bool) -> Any:
    """What Transformers makes of a configuration; ValueError and others where it cannot."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if hasattr(transformers, architecture):
        return getattr(transformers, architecture)(config)
    if "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    raise ValueError(f"it has no {architecture}")


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), dict):
            part: dict[str, Any] = config[name]
            return part
    return config
