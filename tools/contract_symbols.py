"""What the patch sets and their worker side lean on in vLLM. Checked by tools/contract.py.

Places in speculators are those of 0.4.0.1's vllm_hidden_states_generator.py ("generator") unless 0.3.0 is named.
"""

from __future__ import annotations

from contract import Lean

_CONFIG = "vllm.config"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
_OUTPUT = "vllm.v1.core.sched.output"
_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_UTILS, _PLANNING = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
_IMPORT = "the generator cannot be imported"


def _moved(name: str) -> str:
    return f"{_UTILS}:{name}|{_PLANNING}:{name}"


LEANS: tuple[Lean, ...] = (
    # Names that the generator module binds: without them no patch set can act.
    Lean(
        "prefix_caching",
        f"{_CONFIG}:CacheConfig",
        "generator, CacheConfig(...)",
        "a cached token has no row",
        passes=("enable_prefix_caching", "gpu_memory_utilization"),
    ),
    Lean(
        "block_size",
        f"{_CONFIG}:CacheConfig",
        "generator, VLLM_BLOCK_SIZE",
        "workers refuse a block size of 16",
        passes=("block_size", "gpu_memory_utilization", "enable_prefix_caching"),
    ),
    Lean(
        "forward_hooks",
        f"{_CONFIG}:ParallelConfig",
        "generator, ParallelConfig(worker_extension_cls=)",
        "our class does not reach the workers",
        passes=("worker_extension_cls", "tensor_parallel_size"),
    ),
    Lean(
        "is_encoder_decoder",
        f"{_CONFIG}:SchedulerConfig",
        "generator 0.3.0, SchedulerConfig(...)",
        "ValidationError",
        passes=("max_num_seqs", "max_num_batched_tokens"),
        may_pass=("max_model_len", "is_encoder_decoder"),
    ),
    Lean(
        "chunked_prefill",
        f"{_CONFIG}:SchedulerConfig.enable_chunked_prefill",
        "generator, max_num_batched_tokens",
        "steps smaller than max_model_len are refused",
    ),
    Lean(
        "lifecycle",
        f"{_CONFIG}:ModelConfig",
        "generator, ModelConfig(...)",
        "the configuration cannot be built",
        passes=("model", "tokenizer", "trust_remote_code", "dtype", "max_model_len", "enforce_eager"),
    ),
    Lean(
        "lifecycle",
        f"{_CONFIG}:VllmConfig",
        "generator, VllmConfig(...)",
        "the configuration cannot be built",
        passes=("model_config", "cache_config", "parallel_config", "scheduler_config", "device_config", "load_config"),
    ),
    Lean("lifecycle", f"{_CONFIG}:DeviceConfig", "generator, import", _IMPORT, call=True),
    Lean("lifecycle", f"{_CONFIG}:LoadConfig", "generator, import", _IMPORT, call=True),
    Lean("lifecycle", "vllm.sampling_params:SamplingParams", "generator, SamplingParams(...)", _IMPORT),
    Lean(
        "lifecycle",
        "vllm.v1.structured_output:StructuredOutputManager",
        "generator, StructuredOutputManager(...)",
        _IMPORT,
        passes=("vllm_config",),
    ),
    Lean(
        "request_eos_token_id",
        "vllm.v1.request:Request",
        "generator, Request(...)",
        "TypeError in generate()",
        passes=("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time", "block_hasher"),
        may_pass=("eos_token_id",),
    ),
    Lean(
        "utils_hashing",
        "vllm.utils.hashing:get_hash_fn_by_name|vllm.utils:get_hash_fn_by_name",
        "generator, from vllm.utils.hashing import get_hash_fn_by_name",
        _IMPORT,
        passes=("hash_fn_name",),
    ),
    Lean(
        "utils_hashing",
        f"{_UTILS}:get_request_block_hasher",
        "generator, get_request_block_hasher(...)",
        _IMPORT,
        passes=("caching_hash_fn",),
        may_pass=("block_size", "hash_block_size"),
    ),
    Lean("utils_hashing", f"{_UTILS}:init_none_hash", "generator, init_none_hash(...)", _IMPORT, passes=("hash_fn",)),
    Lean("kv_planning_module", _moved("_get_kv_cache_groups_uniform_spec"), "generator, import", _IMPORT),
    Lean("kv_planning_module", _moved("unify_hybrid_kv_cache_specs"), "generator, import", _IMPORT),
    Lean(
        "kv_cache_specs",
        _moved("get_kv_cache_config_from_groups"),
        "generator, get_kv_cache_config_from_groups(...)",
        "TypeError in the constructor",
        passes=("vllm_config", "kv_cache_groups", "available_memory"),
        may_pass=("kv_cache_specs",),
    ),
    Lean(
        "kv_cache_groups",
        _moved("get_kv_cache_groups"),
        "generator, _get_kv_cache_groups_uniform_spec(...)",
        "models with several kinds of layers cannot be planned",
        passes=("vllm_config", "kv_cache_spec"),
    ),
    Lean(
        "kv_cache_groups",
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec.layer_names",
        "generator, kv_cache_groups=",
        "specs cannot be read from groups",
    ),
    Lean(
        "scheduler_block_size",
        _SCHEDULER,
        "generator, Scheduler(...)",
        "TypeError or AssertionError in the constructor",
        passes=("vllm_config", "kv_cache_config", "structured_output_manager"),
        may_pass=("block_size", "hash_block_size"),
    ),
    Lean(
        "scheduler_block_size",
        f"{_UTILS}:resolve_kv_cache_block_sizes",
        "generator, Scheduler(block_size=)",
        "the scheduler works with another block size than the workers",
        passes=("kv_cache_config", "vllm_config"),
        when=f"{_SCHEDULER}(hash_block_size)",
    ),
    Lean(
        "scheduler_block_size",
        "vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups",
        "generator, Scheduler(...)",
        "the block size of the workers is unknown",
    ),
    Lean(
        "scheduler_block_size",
        "vllm.v1.kv_cache_interface:KVCacheSpec.block_size",
        "generator, Scheduler(...)",
        "the block size of the workers is unknown",
    ),
    Lean(
        "kv_cache_specs_required",
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec.kv_cache_spec",
        "generator, get_kv_cache_config_from_groups(...)",
        "specs cannot be read from groups",
    ),
    Lean(
        "scheduler_own_block_size",
        f"{_CONFIG}:CacheConfig.block_size",
        "generator, Scheduler(block_size=)",
        "the block size of the workers is unknown",
    ),
    # The scheduler.
    Lean(
        "prefill_steps",
        f"{_SCHEDULER}.schedule",
        "generator, scheduler.schedule()",
        "prompts over two steps lose rows",
        call=True,
    ),
    Lean(
        "prefill_steps",
        f"{_SCHEDULER}.add_request",
        "generator, scheduler.add_request(...)",
        "more sequences than fit starve",
        passes=("request",),
    ),
    Lean(
        "prefill_steps",
        f"{_SCHEDULER}.finish_requests",
        "generator, scheduler.finish_requests(...)",
        "requests end before their prompt is computed",
        passes=("request_ids", "finished_status"),
    ),
    Lean(
        "prefill_steps",
        f"{_SCHEDULER}.requests",
        "generator, the loop in generate()",
        "unfinished prompts are not noticed",
    ),
    Lean("prefill_steps", f"{_SCHEDULER}.kv_cache_config", "generator, Scheduler(...)", "the capacity is unknown"),
    Lean(
        "prefill_steps",
        "vllm.v1.kv_cache_interface:KVCacheConfig.num_blocks",
        "generator, num_gpu_blocks",
        "the capacity is unknown",
    ),
    Lean(
        "prefill_steps",
        "vllm.v1.request:Request.num_computed_tokens",
        "generator 0.3.0, finish_requests",
        "progress is unknown",
    ),
    Lean(
        "prefill_steps",
        "vllm.v1.request:Request.num_prompt_tokens",
        "generator 0.3.0, finish_requests",
        "progress is unknown",
    ),
    Lean("prefill_steps", "vllm.v1.request:RequestStatus.FINISHED_ABORTED", "generator, RequestStatus", _IMPORT),
    # The executor.
    Lean(
        "start_method",
        f"{_EXECUTOR}._init_executor",
        "generator, MultiprocExecutor(...)",
        "forked workers lose CUDA",
        call=True,
    ),
    Lean(
        "start_method",
        "vllm.platforms.interface:Platform.is_cuda_alike",
        "generator, MultiprocExecutor(...)",
        "forked workers lose CUDA",
    ),
    Lean(
        "forward_hooks", _EXECUTOR, "generator, MultiprocExecutor(vllm_config=)", "no workers", passes=("vllm_config",)
    ),
    Lean(
        "forward_hooks",
        f"{_EXECUTOR}.vllm_config|vllm.v1.executor.abstract:Executor.vllm_config|vllm.executor.executor_base:ExecutorBase.vllm_config",
        "generator, MultiprocExecutor(vllm_config=)",
        "the layout cannot be resolved",
    ),
    Lean(
        "reply_rank",
        f"{_EXECUTOR}.collective_rpc",
        "generator, collective_rpc(..., unique_reply_rank=0)",
        "one layer is taken for the list of layers",
        passes=("method", "timeout", "args", "kwargs", "unique_reply_rank"),
    ),
    Lean(
        "two_phase",
        f"{_EXECUTOR}.execute_model",
        "generator, executor.execute_model(...)",
        "«State error» at the second step",
        passes=("scheduler_output",),
    ),
    Lean("lifecycle", f"{_EXECUTOR}.shutdown", "generator, __del__", "workers are left behind", call=True),
    Lean(
        "warm_up",
        f"{_EXECUTOR}.initialize_from_config",
        "generator, executor.initialize_from_config(...)",
        "no KV cache",
        passes=("kv_cache_configs",),
    ),
    Lean(
        "warm_up",
        f"{_EXECUTOR}.compile_or_warm_up_model",
        "generator, executor.initialize_from_config(...)",
        "no warm-up",
        call=True,
        when=f"{_EXECUTOR}.compile_or_warm_up_model",
    ),
    Lean(
        "kv_cache_layout",
        f"{_EXECUTOR}.set_kv_cache_layout",
        "generator, get_kv_cache_config_from_groups(...)",
        "«KV cache layout has not been resolved yet»",
        passes=("layout_name",),
        may_pass=("cp_kv_cache_interleave_size",),
        when=f"{_EXECUTOR}.set_kv_cache_layout",
    ),
    Lean(
        "kv_cache_layout",
        f"{_EXECUTOR}.get_supported_kv_cache_layouts",
        "generator, get_kv_cache_config_from_groups(...)",
        "«KV cache layout has not been resolved yet»",
        call=True,
        when=f"{_EXECUTOR}.set_kv_cache_layout",
    ),
    Lean(
        "kv_cache_layout",
        "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
        "generator, get_kv_cache_config_from_groups(...)",
        "«KV cache layout has not been resolved yet»",
        passes=("vllm_config", "supported_layouts", "kv_cache_specs"),
        when=f"{_EXECUTOR}.set_kv_cache_layout",
    ),
    Lean(
        "kv_cache_layout",
        f"{_CONFIG}:ParallelConfig.cp_kv_cache_interleave_size",
        "generator, MultiprocExecutor(...)",
        "workers get no interleave size",
        when=f"{_EXECUTOR}.set_kv_cache_layout(cp_kv_cache_interleave_size)",
    ),
    Lean(
        "cpu_kv_cache_space",
        "vllm.envs:VLLM_CPU_KVCACHE_SPACE",
        "generator, mem_get_info()",
        "the cache takes a share of all memory",
    ),
    Lean(
        "cpu_kv_cache_space",
        "vllm.platforms.interface:Platform.is_cpu",
        "generator, mem_get_info()",
        "the cache takes a share of all memory",
    ),
    Lean(
        "lifecycle",
        "vllm.envs:VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "generator, execute_model(...)",
        "requests to workers have no time limit",
    ),
    # The workers.
    Lean(
        "forward_hooks",
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        "custom_worker, _patched_forward",
        "no step is run",
        passes=("scheduler_output",),
    ),
    Lean(
        "forward_hooks",
        "vllm.v1.worker.gpu_worker:Worker.model_runner",
        "custom_worker, self.model_runner.model",
        "no model to hook",
    ),
    Lean(
        "forward_hooks",
        "vllm.distributed:get_tp_group|vllm.distributed.parallel_state:get_tp_group",
        "custom_worker, get_tp_group()",
        "every rank would keep rows",
        call=True,
    ),
    Lean("forward_hooks", f"{_V1}.get_model", "custom_worker, self.model_runner.model", "no model to hook", call=True),
    Lean(
        "forward_hooks", f"{_V1}.input_batch", "custom_worker, input_batch.req_id_to_index", "rows cannot be attributed"
    ),
    Lean(
        "forward_hooks",
        "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
        "custom_worker, req_id_to_index",
        "rows cannot be attributed",
    ),
    Lean(
        "recurrent_state",
        "vllm.model_executor.layers.mamba.abstract:MambaBase.kv_cache",
        "custom_worker, _patched_forward",
        "a prompt of one token begins with another one's state",
    ),
    Lean(
        "recurrent_state",
        f"{_V1}.kv_cache_config",
        "custom_worker, _patched_forward",
        "a prompt of one token begins with another one's state",
    ),
    Lean(
        "recurrent_state",
        "vllm.v1.core.sched.output:CachedRequestData.new_block_ids",
        "custom_worker, _patched_forward",
        "a prompt of one token begins with another one's state",
    ),
    Lean(
        "two_phase",
        f"{_V1}.execute_model_state",
        "generator, executor.sample_tokens(...)",
        "«State error» at the second step",
        when=f"{_EXECUTOR}.sample_tokens",
    ),
    Lean(
        "two_phase",
        f"{_V2}.execute_model_state",
        "generator, executor.sample_tokens(...)",
        "wrong positions in the next chunk",
        when=_V2,
    ),
    Lean(
        "two_phase",
        f"{_V2}.sample_tokens",
        "generator, executor.sample_tokens(...)",
        "wrong positions in the next chunk",
        when=_V2,
    ),
    Lean(
        "forward_hooks",
        "vllm.v1.worker.gpu.model_runner:ExecuteModelState.input_batch",
        "custom_worker, input_batch",
        "rows cannot be attributed on runner V2",
        when="vllm.v1.worker.gpu.model_runner:ExecuteModelState",
    ),
    Lean(
        "forward_hooks",
        "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
        "custom_worker, input_batch",
        "rows cannot be attributed on runner V2",
        when=_V2,
    ),
    *(
        Lean("forward_hooks", f"{_OUTPUT}:{name}", "custom_worker, request metadata", "rows cannot be attributed")
        for name in (
            "SchedulerOutput.num_scheduled_tokens",
            "SchedulerOutput.total_num_scheduled_tokens",
            "SchedulerOutput.scheduled_new_reqs",
            "SchedulerOutput.scheduled_cached_reqs",
            "SchedulerOutput.finished_req_ids",
            "NewRequestData.req_id",
            "NewRequestData.num_computed_tokens",
            "CachedRequestData.req_ids",
            "CachedRequestData.num_computed_tokens",
        )
    ),
    Lean(
        "forward_hooks",
        f"{_CONFIG}:ModelConfig.hf_text_config",
        "custom_worker, base_model.layers",
        "the number of layers is unknown",
    ),
    Lean(
        "sliding_window",
        f"{_CONFIG}:CacheConfig.sliding_window",
        "generator, CacheConfig(...)",
        "models with a window in every layer attend to everything",
    ),
    Lean(
        "sliding_window",
        f"{_CONFIG}:ModelConfig.get_sliding_window",
        "generator, CacheConfig(...)",
        "the window is unknown",
        call=True,
    ),
    Lean(
        "cpu_operators",
        f"{_CONFIG}:CompilationConfig.custom_ops",
        "generator, VllmConfig(...)",
        "DeepSeek's queries are rotated wrongly on CPU",
    ),
    Lean(
        "cpu_operators",
        "vllm._custom_ops:rotary_embedding",
        "generator, VllmConfig(...)",
        "the operator cannot be tried",
        passes=("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
    ),
    Lean(
        "cpu_operators",
        "vllm._custom_ops:rms_norm",
        "generator, VllmConfig(...)",
        "the operator cannot be tried",
        passes=("out", "input", "weight", "epsilon"),
    ),
    Lean(
        "mla_model_runner",
        f"{_CONFIG}:ModelConfig.use_mla",
        "generator, VllmConfig(...)",
        "it is not known whether a model uses MLA",
    ),
    Lean(
        "remote_code",
        "vllm.transformers_utils.config:get_config",
        "generator, AutoConfig.from_pretrained(...)",
        "a configuration class that only vLLM has cannot be read",
        passes=("model", "trust_remote_code"),
    ),
    Lean(
        "remote_code",
        "vllm.transformers_utils.config:get_hf_text_config",
        "generator, config.num_hidden_layers",
        "the number of layers is unknown",
        passes=("config",),
    ),
    Lean(
        "lifecycle",
        f"{_CONFIG}:ModelConfig.get_vocab_size",
        "generator, generate()",
        "token ids are not checked",
        call=True,
    ),
)
