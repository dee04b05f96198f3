"""What the configuration of a target model tells before it is loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_vllm_compat.errors import CompatError


@dataclass(frozen=True)
class TargetModel:
    """Facts that every command needs. ``folder`` is None for a model that is not on this machine yet."""

    path: str
    folder: Path | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None
    dtype: str
    own_code: bool

    def layer_ids(self, asked: tuple[int, ...]) -> list[int]:
        """The layers to extract: those asked for, or speculators' own choice.

        Raises:
            CompatError: a layer does not exist, or speculators' choice makes no sense for so few layers.
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


def read_config(path: str) -> tuple[dict[str, Any], Path | None]:
    """``config.json`` of a folder, a file or a model in the hub's cache; and the folder it lies in.

    Raises:
        CompatError: there is none.
    """
    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        file = _cached(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompatError(f"{path}: expected a config.json; found {type(error).__name__}: {error}") from None
    return config, file.parent if file.name == "config.json" else None


def _cached(path: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, "config.json"))  # from the cache; asks the hub only where that is allowed
    except Exception as error:  # noqa: BLE001 - whatever the hub says, the model is not there
        raise CompatError(
            f"{path}: expected a folder with config.json, or a model in the hub's cache; found neither "
            f"({type(error).__name__})"
        ) from None


def read_target(path: str) -> TargetModel:
    """The facts of a model, read from ``config.json`` alone."""
    config, folder = read_config(path)
    text = text_part(config)
    missing = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if name not in text]
    if missing:  # a configuration that leaves its type's defaults out
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(path, trust_remote_code=True).get_text_config().to_dict()
    named = (part.get(name) for part in (text, config) for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, named), "bfloat16"))
    return TargetModel(
        path=path,
        folder=folder,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_length=text.get("max_position_embeddings"),
        dtype="bfloat16" if dtype == "float32" else dtype,  # what vLLM's dtype="auto" makes of it
        own_code="auto_map" in config,
    )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), dict):
            part: dict[str, Any] = config[name]
            return part
    return config
