"""speculators on vLLM 0.16 as it is, with the least that lets it start: what it returns is its own.

0.4.0.1 needs its memory query answered, where there is no GPU. 0.3.0 needs the seven adapters below besides; each only
passes an argument, renames or makes a call that vLLM asks for, and none touches scheduling, capture, order or slicing.
Also the extension class for the workers of 0.3.0: the folder of this file must be on their PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension


class Extension(HiddenStatesWorkerExtension):
    """The worker side of 0.3.0. vLLM 0.11.1 renamed a method of the model."""

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        super()._setup_hidden_states_capture(layer_ids)
        base = self.model_runner.model.model
        base.get_input_embeddings = base.embed_input_ids


def prepare(module: Any, version: str, memory: bool = True) -> None:
    """Rebind names in speculators' generator module; ``memory`` answers its memory query, for a machine without a GPU."""
    import psutil
    import torch

    def host_memory() -> tuple[int, int]:
        free = psutil.virtual_memory()
        return int(free.available), int(free.total)

    if memory and hasattr(module, "mem_get_info"):
        module.mem_get_info, module.empty_cache = host_memory, lambda: None
    elif memory:
        torch.cuda.mem_get_info, torch.cuda.empty_cache = host_memory, lambda: None
    if not version.startswith("0.3"):
        return
    scheduler_config, cache_config = module.SchedulerConfig, module.CacheConfig
    parallel_config, scheduler = module.ParallelConfig, module.Scheduler
    kv_cache_config = module.get_kv_cache_config_from_groups
    module.SchedulerConfig = lambda **kw: scheduler_config(**kw, is_encoder_decoder=False)
    module.CacheConfig = lambda **kw: cache_config(**kw, enable_prefix_caching=False)
    module.ParallelConfig = lambda **kw: parallel_config(**{**kw, "worker_extension_cls": "unpatched.Extension"})
    module.Scheduler = lambda **kw: scheduler(**kw, block_size=kw["vllm_config"].cache_config.block_size)
    module.get_kv_cache_config_from_groups = lambda **kw: kv_cache_config(
        **{key: value for key, value in kw.items() if key != "kv_cache_specs"}
    )

    class Executor(module.MultiprocExecutor):  # type: ignore[name-defined, misc]
        """The reply in the form of vLLM 0.11.0, and the second phase of a step."""

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            return [reply] if method == "_get_captured_states" else reply

        def execute_model(self, scheduler_output: Any) -> None:
            super().execute_model(scheduler_output)
            if scheduler_output.total_num_scheduled_tokens:
                self.sample_tokens(None)

    module.MultiprocExecutor = Executor
