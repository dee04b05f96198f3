"""A generator whose rows are a function of the tokens, for tests of the command line that need no model.

Run as a script it is `extract` with this generator: ``standin.py DELAY extract-options...``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, HIDDEN, VOCABULARY = 6, 16, 512


def rows(ids: Sequence[int], layer: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[len(ids), HIDDEN]``: every value tells layer, token and position."""
    base = torch.tensor([[token * 8 + layer] for token in ids], dtype=torch.float32)
    return (base + torch.arange(1, HIDDEN + 1) / 64 + torch.arange(len(ids))[:, None]).to(dtype)


class Generator:
    """What ``extract`` needs of speculators' generator, and ways to fail."""

    def __init__(
        self, layer_ids: list[int], *, delay: float = 0, poison: int | None = None, interrupt_at: int = -1
    ) -> None:
        self.layer_ids, self.delay, self.poison, self.interrupt_at = layer_ids, delay, poison, interrupt_at
        self.calls: list[list[list[int]]] = []
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        self.executor = SimpleNamespace(collective_rpc=lambda _function: None)

    def generate(self, token_ids: list[list[int]]) -> list[dict[str, Any]]:
        self.calls.append(token_ids)
        time.sleep(self.delay)
        if len(self.calls) == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        if any(self.poison in ids for ids in token_ids):
            raise RuntimeError("poison")
        return [
            {"input_ids": torch.tensor(ids), "hidden_states": [rows(ids, k) for k in self.layer_ids], "loss_mask": None}
            for ids in token_ids
        ]


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def data_config(plan: Any) -> Any:
    """In place of speculators' own, which takes half a minute to import."""
    return {
        "hidden_states": {"layer_ids": plan.layer_ids},
        "data": {"num_samples": len(plan.prepared.samples)},
        "model": {"target_model_path": plan.target.path},
    }


if __name__ == "__main__":
    from spec_vllm_compat.cli import job, main, plan

    plan.Plan.data_config = data_config  # type: ignore[method-assign]
    delay = float(sys.argv[1])
    job.speculators_generator = lambda **kwargs: Generator(kwargs["layer_ids"], delay=delay)
    main(sys.argv[2:])
