"""States of recurrent layers: Mamba, gated delta, linear attention, short convolution (patch set recurrent_state)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def clear_states(worker: Any, scheduler_output: Any) -> int:
    """Set the states to zero of requests whose first tokens in this step are a single one.

    vLLM takes a single token as decoding, which goes on from the state that is there: that of the request that had the
    block before. Prompts of one token, and those of which a step has room for one token only, would begin with it.

    Args:
        worker: vLLM's worker, its KV cache allocated.
        scheduler_output: the scheduler's step, not yet executed.

    Returns:
        The number of such requests.
    """
    beginning = list(_beginning_with_one(scheduler_output))
    if not beginning:
        return 0
    for group, state in states(worker):
        for _, blocks in beginning:
            state[blocks[group]] = 0
    return len(beginning)


def states(worker: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The states of all recurrent layers, ``[blocks, ...]`` each, with the number of their KV cache group."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    for number, group in enumerate(worker.model_runner.kv_cache_config.kv_cache_groups):
        for layer in (layers[name] for name in group.layer_names if is_recurrent(layers[name])):
            for state in _tensors(layer.kv_cache):
                yield number, state


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state instead of keys and values."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(layer, MambaBase)


def _beginning_with_one(scheduler_output: Any) -> Iterator[tuple[str, Any]]:
    """Requests that begin in this step with one token, and their blocks: a list for each KV cache group."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    begun = [(r.req_id, r.num_computed_tokens, r.block_ids) for r in scheduler_output.scheduled_new_reqs]
    # After a preemption a request begins again, with new blocks.
    begun += zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    for request, computed, blocks in begun:
        if computed == 0 and scheduled[request] == 1:
            yield request, blocks


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The state tensors ``[blocks, ...]`` of a layer; up to vLLM 0.18 in a list with one entry a virtual engine."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
