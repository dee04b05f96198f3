"""States of recurrent layers before a request's first tokens, on stand-ins; no engine on CPU runs such models before 0.26."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spec_vllm_compat.worker import recurrent  # noqa: E402

BLOCKS = 6


class Recurrent:
    def __init__(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Group 0 has keys and values, group 1 two recurrent layers, one as up to vLLM 0.18; every state is used."""
    monkeypatch.setattr(recurrent, "is_recurrent", lambda layer: isinstance(layer, Recurrent))
    layers = {
        "attention": SimpleNamespace(kv_cache=torch.ones(2, BLOCKS, 4)),
        "mamba": Recurrent((torch.ones(BLOCKS, 3), torch.ones(BLOCKS, 2, 2))),
        "older": Recurrent([(torch.ones(BLOCKS, 3), torch.ones(BLOCKS, 2, 2))]),
    }
    groups = [SimpleNamespace(layer_names=["attention"]), SimpleNamespace(layer_names=["mamba", "older"])]
    return SimpleNamespace(
        layers=layers,
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups)),
    )


def step(new: dict[str, tuple[int, int, int]], cached: dict[str, tuple[int, int, int | None]]) -> SimpleNamespace:
    """Request to (tokens computed, tokens in this step, block of its state)."""
    known = {**new, **cached}
    return SimpleNamespace(
        num_scheduled_tokens={name: tokens for name, (_, tokens, _) in known.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done, block_ids=([0, 1], [block]))
            for name, (done, _, block) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[done for done, _, _ in cached.values()],
            new_block_ids=[None if block is None else ([0], [block]) for _, _, block in cached.values()],
        ),
    )


def cleared(worker: SimpleNamespace) -> set[int]:
    """Blocks whose states are zero; the same in every state."""
    found = [{block for block in range(BLOCKS) if not state[block].any()} for _, state in recurrent.states(worker)]
    assert len(found) == 4
    assert all(blocks == found[0] for blocks in found)
    return found[0]


def test_a_request_that_begins_with_one_token_begins_with_no_state(worker: SimpleNamespace) -> None:
    scheduled = step(
        {"one": (0, 1, 2), "many": (0, 7, 3), "continued": (16, 1, 1)},
        {"decoding": (9, 1, None), "next": (5, 4, 4), "again": (0, 1, 5)},
    )
    assert recurrent.clear_states(worker, scheduled) == 2
    assert cleared(worker) == {2, 5}
    assert bool((worker.layers["attention"].kv_cache == 1).all())


def test_nothing_is_cleared_where_every_request_begins_with_more(worker: SimpleNamespace) -> None:
    assert recurrent.clear_states(worker, step({"many": (0, 2, 2)}, {"decoding": (9, 1, None)})) == 0
    assert cleared(worker) == set()
