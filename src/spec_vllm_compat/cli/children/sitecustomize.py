"""First in every Python process of ``spec-vllm-compat run``: the environment's own sitecustomize, then the shim.

Found through PYTHONPATH, so it reaches children however they are started: spawned, by subprocess, by torchrun.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _here]
_spec = PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
if importlib.util.find_spec("spec_vllm_compat") is not None:
    import spec_vllm_compat  # noqa: F401
elif sys.executable == os.environ.get("SPEC_VLLM_COMPAT_RUN"):  # a child may be another Python without it; we are not
    sys.exit("spec-vllm-compat run: expected spec_vllm_compat to be installed; found it only in the current folder")
