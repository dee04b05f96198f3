"""Stand-ins for speculators and vLLM, for faults that the real packages cannot be made to have."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

GENERATOR = """
import torch
from vllm.everything import *
from vllm.everything import _get_kv_cache_groups_uniform_spec

class VllmHiddenStatesGenerator:
    def __init__(self):
        config = dict(kv_cache_specs=None)
        get_kv_cache_config_from_groups(vllm_config=1, kv_cache_specs=2)
    def _create_vllm_config(self):
        SchedulerConfig(max_model_len=1)
    def _setup_capture(self): pass
    def generate(self, token_ids): return []
"""

VLLM = """
class AutoConfig: pass
class AutoTokenizer: pass
class ModelConfig:
    def __init__(self, model, trust_remote_code=False): pass
class VllmConfig:
    def __init__(self, model_config=None, cache_config=None, compilation_config=None): pass
class SchedulerConfig:
    def __init__(self, max_model_len, is_encoder_decoder, enable_chunked_prefill=True): pass
class CacheConfig:
    def __init__(self, block_size=16, enable_prefix_caching=True): pass
class ParallelConfig:
    def __init__(self, tensor_parallel_size=1, worker_extension_cls=""): pass
class Request:
    def __init__(self, request_id, eos_token_id=None): pass
class Scheduler:
    def __init__(self, vllm_config, block_size): pass
    def schedule(self): pass
    def add_request(self, request): pass
    def finish_requests(self, ids, status): pass
class MultiprocExecutor:
    def __init__(self, vllm_config): pass
    def _init_executor(self): pass
    def collective_rpc(self, method, args=(), unique_reply_rank=None): pass
    def execute_model(self, output): pass
    def sample_tokens(self, output): pass
    def shutdown(self): pass
def unify_hybrid_kv_cache_specs(kv_cache_spec): pass
def _get_kv_cache_groups_uniform_spec(kv_cache_spec): pass
def get_kv_cache_groups(vllm_config, kv_cache_spec): pass
def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups=None): pass
"""

TORCH = """
class Tensor: pass
class dtype: pass
class cuda:
    mem_get_info = empty_cache = is_available = staticmethod(lambda: False)
"""


def environment(
    folder: Path, *, speculators: str | None = "0.3.0", vllm: str | None = "0.16.0", code: str = VLLM
) -> Path:
    """A site folder with a fake speculators, vLLM and torch of the given versions (None: not installed)."""
    site = folder / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text(TORCH)
    (site / "numpy.py").write_text("def __getattr__(name): return object\n")
    (site / "torch" / "version.py").write_text("__version__ = '2.10.0'\n")
    if vllm is not None:
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").write_text("")
        (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{vllm}'\n")
        (site / "vllm" / "everything.py").write_text(code)
    if speculators is not None:
        data_generation = site / "speculators" / "data_generation"
        data_generation.mkdir(parents=True)
        (site / "speculators" / "__init__.py").write_text("")
        generator = float(speculators[:3]) < 0.5
        (data_generation / "__init__.py").write_text(
            "from .vllm_hidden_states_generator import VllmHiddenStatesGenerator\n" if generator else ""
        )
        if generator:
            (data_generation / "vllm_hidden_states_generator.py").write_text(GENERATOR)
        info = site / f"speculators-{speculators}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: speculators\nVersion: {speculators}\n")
        (info / "RECORD").write_text("speculators/__init__.py,,\n")
    return site


def run(site: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where only our own package, wrapt, packaging and the fakes can be imported."""
    import packaging
    import wrapt

    import spec_vllm_compat

    ours = site.parent / "ours"
    ours.mkdir(exist_ok=True)
    for package in (packaging, wrapt, spec_vllm_compat):
        source = Path(package.__file__).parent
        link = ours / source.name
        if not link.exists():
            link.symlink_to(source)
    return subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{site}:{ours}", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
