"""The patch sets, one module each, in the order in which they are reported.

A module holds a record (why, what changed upstream and when, how it is probed, when it can go) and its changes. Patch
sets know nothing of each other. To add one: write the module, add it here; docs and reports follow.
"""

from __future__ import annotations

from spec_vllm_compat.patches import (
    aux_hidden_states,
    block_size,
    chunked_prefill,
    cpu_kv_cache_space,
    cpu_operators,
    device_name,
    forward_hooks,
    is_encoder_decoder,
    kv_cache_groups,
    kv_cache_layout,
    kv_cache_specs,
    kv_cache_specs_required,
    kv_planning_module,
    lifecycle,
    memory_query,
    mla_model_runner,
    prefill_steps,
    prefix_caching,
    recurrent_state,
    remote_code,
    reply_rank,
    request_eos_token_id,
    result_order,
    scheduler_block_size,
    scheduler_own_block_size,
    sliding_window,
    start_method,
    transformers_5,
    two_phase,
    utils_hashing,
    warm_up,
)
from spec_vllm_compat.seams import PatchSet

PATCH_SETS: tuple[PatchSet, ...] = (
    aux_hidden_states.PATCH_SET,
    two_phase.PATCH_SET,
    reply_rank.PATCH_SET,
    forward_hooks.PATCH_SET,
    transformers_5.PATCH_SET,
    utils_hashing.PATCH_SET,
    kv_planning_module.PATCH_SET,
    is_encoder_decoder.PATCH_SET,
    chunked_prefill.PATCH_SET,
    block_size.PATCH_SET,
    kv_cache_layout.PATCH_SET,
    kv_cache_groups.PATCH_SET,  # before the next two: they see the groups
    kv_cache_specs.PATCH_SET,
    kv_cache_specs_required.PATCH_SET,
    scheduler_block_size.PATCH_SET,
    scheduler_own_block_size.PATCH_SET,
    request_eos_token_id.PATCH_SET,
    warm_up.PATCH_SET,
    memory_query.PATCH_SET,
    device_name.PATCH_SET,
    cpu_kv_cache_space.PATCH_SET,
    cpu_operators.PATCH_SET,
    start_method.PATCH_SET,
    remote_code.PATCH_SET,
    prefix_caching.PATCH_SET,
    mla_model_runner.PATCH_SET,
    sliding_window.PATCH_SET,
    recurrent_state.PATCH_SET,
    prefill_steps.PATCH_SET,
    result_order.PATCH_SET,
    lifecycle.PATCH_SET,
)
