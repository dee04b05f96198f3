"""What only importing tells. Run by ``doctor`` in a process of its own: an environment may crash or hang on import.

``python -m spec_vllm_compat.cli.probe FILE`` writes what it saw to FILE as JSON, as far as it came.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any


def _torch() -> dict[str, Any]:
    import torch

    seen: dict[str, Any] = {"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            seen["devices"].append([torch.cuda.get_device_name(index), free, total])
    return seen


def _vllm() -> dict[str, Any]:
    import vllm.envs
    from vllm.platforms import current_platform

    return {
        "platform": type(current_platform).__name__,
        "device": current_platform.device_type,
        "v2_runner": bool(getattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", False)),
    }


def _generator() -> dict[str, Any]:
    import spec_vllm_compat  # noqa: F401, I001 - before speculators
    from speculators.data_generation import vllm_hidden_states_generator as module
    from spec_vllm_compat import report
    from spec_vllm_compat.registry import _state

    state = report()
    return {
        "patches": [[patch.record.id, patch.applied, patch.sentence(), patch.disagree] for patch in state.patches],
        "failure": str(state.failure) if state.failure else None,
        "hooked": _state.installation is not None,
        "file": module.__file__,
        "text": str(state),
    }


def look(output: Path) -> None:
    seen: dict[str, Any] = {"early": [name for name in ("speculators", "vllm", "torch") if name in sys.modules]}
    # The generator first: torch.cuda and the platform are then seen as the generator's process sees them.
    for name, step in (("generator", _generator), ("torch", _torch), ("vllm", _vllm)):
        try:
            seen[name] = step()
        except BaseException as error:  # noqa: BLE001 - whatever a broken environment raises is the finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            seen[name] = {"error": f"{type(error).__name__}: {error}", "at": f"{last.filename}:{last.lineno}"}
        output.write_text(json.dumps(seen))


if __name__ == "__main__":
    look(Path(sys.argv[1]))
