"""``env``: what is installed and what is set, for bug reports; read without importing torch, vLLM or speculators."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import click

from spec_vllm_compat._version import __version__
from spec_vllm_compat.versions import detect

PACKAGES = ("wrapt", "packaging", "click", "tqdm", "datasets", "numpy", "triton", "compressed-tensors")
PREFIXES = ("SPEC_VLLM_COMPAT", "VLLM_", "CUDA_VISIBLE", "HF_HUB", "HF_HOME", "NCCL_", "OMP_NUM")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@click.command("env", short_help="Versions for a bug report.")
def command() -> None:
    """Print what is installed and set, for a bug report. Imports neither torch nor vLLM."""
    found = facts()
    width = max(map(len, found))
    click.echo("\n".join(["```", *(f"{name:{width}}  {text}" for name, text in found.items()), "```"]))


def facts() -> dict[str, str]:
    """Machine, packages and where they come from, environment variables without secrets."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found = {
        "python": python(),
        "system": f"{platform.platform()}, {os.cpu_count()} CPUs, {memory:.0f} GB",
        "gpu": gpus(),
        "spec_vllm_compat": f"{__version__} ({Path(__file__).parents[1]})",
    }
    for installed in detect():
        found[installed.module] = f"{installed.text or 'not installed'} [{installed.source}] {installed.location or ''}"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) and not any(word in name for word in SECRET):
            found[name] = value
    return found


def python() -> str:
    return f"{platform.python_version()} {sys.executable}"


def gpus() -> str:
    """GPUs and driver as nvidia-smi names them; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join((done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines())
