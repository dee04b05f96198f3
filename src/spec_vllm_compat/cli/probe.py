"""What only importing tells. Run by ``doctor`` in a process of its own: an environment may crash or hang on import.

``python -m spec_vllm_compat.cli.probe FILE`` writes what it saw to FILE as JSON, as far as it came.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any


def _generator() -> dict[str, Any]:
    import spec_vllm_compat  # noqa: I001 - before speculators
    from speculators.data_generation import vllm_hidden_states_generator as module

    state = spec_vllm_compat.report()
    return {
        "patches": [[patch.record.id, patch.applied, patch.sentence(), patch.disagree] for patch in state.patches],
        "failure": str(state.failure) if state.failure else None,
        "file": module.__file__,
    }


def _torch() -> dict[str, Any]:
    import torch

    indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = [[torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)] for index in indices]
    return {"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": devices}


def _vllm() -> dict[str, Any]:
    import vllm.envs
    from vllm.platforms import current_platform

    v2_runner = bool(getattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", False))
    return {"device": current_platform.device_type, "v2_runner": v2_runner, "operators": missing_operators()}


def missing_operators() -> str:
    """Why vLLM's compiled operators are not there; empty if they are. vLLM only logs it, and fails at the first forward."""
    import torch
    import vllm._custom_ops

    if hasattr(torch.ops._C, "rms_norm"):
        return ""
    try:
        import vllm._C  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a C library that is too old, another torch
        return f"{type(error).__name__}: {error}"
    return "vllm._C can be imported and has no rms_norm"


if __name__ == "__main__":
    seen: dict[str, Any] = {"early": [name for name in ("speculators", "vllm", "torch") if name in sys.modules]}
    # The generator first: torch.cuda and the platform are then seen as the generator's process sees them.
    for name, step in (("generator", _generator), ("torch", _torch), ("vllm", _vllm)):
        try:
            seen[name] = step()
        except BaseException as error:  # noqa: BLE001 - whatever a broken environment raises is the finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            seen[name] = {"error": f"{type(error).__name__}: {error}", "at": f"{last.filename}:{last.lineno}"}
        Path(sys.argv[1]).write_text(json.dumps(seen))
