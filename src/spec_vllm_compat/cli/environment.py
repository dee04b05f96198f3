"""What is installed and what is set, read without importing anything heavy. Shared by ``env`` and ``doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

from spec_vllm_compat._version import __version__
from spec_vllm_compat.versions import detect

PACKAGES = ("wrapt", "packaging", "click", "datasets", "numpy", "triton", "compressed-tensors")
PREFIXES = ("SPEC_VLLM_COMPAT", "VLLM_", "CUDA_VISIBLE", "HF_HUB", "HF_HOME", "NCCL_", "OMP_NUM")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def packages() -> dict[str, str]:
    """Package to version and where it comes from."""
    found = {"spec_vllm_compat": f"{__version__} ({os.path.dirname(os.path.dirname(__file__))})"}
    for installed in detect():
        found[installed.module] = f"{installed.text or 'not installed'} [{installed.source}] {installed.location or ''}"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "python": f"{platform.python_version()} {sys.executable}",
        "system": f"{platform.platform()}, {os.cpu_count()} CPUs, {memory:.0f} GB",
        "gpu": gpus(),
    }


def gpus() -> str:
    """GPUs and driver as nvidia-smi or rocm-smi name them."""
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi failed: {error}"
        text = done.stdout if done.returncode == 0 else done.stdout + done.stderr
        return "; ".join(text.strip().splitlines()) or "none"
    return "none seen (no nvidia-smi)" + (", rocm-smi is there" if shutil.which("rocm-smi") else "")


def variables() -> dict[str, str]:
    """Environment variables that change what happens; secrets left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not any(word in name for word in SECRET)
    }
