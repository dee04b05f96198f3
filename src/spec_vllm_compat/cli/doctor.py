"""``doctor``: is this environment sound? Seconds, loads no model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat import remote_code, support
from spec_vllm_compat._version import __version__
from spec_vllm_compat.cli.progress import counted, human
from spec_vllm_compat.errors import CompatError, exit_code
from spec_vllm_compat.registry import SWITCH
from spec_vllm_compat.versions import Versions, detect

PLUGIN = "spec_vllm_compat"
WRAPT = "1.16"  # as in pyproject.toml
PACKAGES = ("wrapt", "packaging", "click", "tqdm", "datasets", "numpy", "triton", "compressed-tensors")
VARIABLES = ("SPEC_VLLM_COMPAT", "VLLM_", "CUDA_VISIBLE", "HF_HUB", "HF_HOME", "NCCL_", "OMP_NUM")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BESIDE = "Workers are reached through their extension class all the same."


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is empty where nothing is to be done."""

    id: str
    status: str  # ok, warn or fail
    reason: str
    remedy: str = ""


@click.command("doctor", short_help="Check the environment in seconds.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=Path(), help="Where samples will go.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(output_dir: Path, as_json: bool) -> int:
    """Check this environment, without loading a model: versions, patch sets, plugins, variables, devices, memory, disk.

    The output is made to be pasted into a bug report. Exit status 1 if a check fails.
    """
    findings = list(examine(output_dir))
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    if as_json:
        click.echo(json.dumps(list(map(asdict, findings)), indent=1))
    else:
        click.echo("\n".join(map(_text, findings)))
        click.echo(f"{counted(len(findings), 'check')}: {failed} fail, {warned} warn")
    return 1 if failed else 0


def _text(finding: Finding) -> str:
    head = f"{finding.status.replace('fail', 'FAIL'):4}  {finding.id:14}  "
    body = finding.reason + (f"\n-> {finding.remedy}" if finding.remedy else "")
    wrapper = textwrap.TextWrapper(120 - len(head), break_on_hyphens=False, break_long_words=False)
    lines = [line for part in body.splitlines() for line in wrapper.wrap(part)]
    return head + ("\n" + " " * len(head)).join(lines)


def examine(output_dir: Path) -> Iterator[Finding]:
    """All findings, in order."""
    versions = detect()
    yield from environment(versions)
    switch = os.environ.get(SWITCH, "")
    if switch.lower() in {"off", "0", "false"}:
        yield Finding("switch", "fail", f"{SWITCH}={switch}: the shim changes nothing", f"unset {SWITCH}")
    else:
        yield Finding("switch", "ok", f"{SWITCH} is {switch or 'not set'}")
    pair = _pair(versions)
    yield pair
    yield _wrapt()
    yield _torch_of_vllm(versions)
    yield _plugin()
    yield Finding("remote_code", "ok", remote_code.sentence())
    seen, problem = _probe() if versions.vllm.present and versions.speculators.present else ({}, None)
    if problem:
        yield Finding("imports", "fail", problem, "Run `python -c 'import vllm, speculators'` and look at its error.")
    if pair.status == "fail" or "generator" not in seen:
        cause = "pair" if pair.status == "fail" else "imports"
        yield Finding("patch_sets", "fail", f"not decided: see {cause}")
    else:
        yield from _generator(seen["generator"], seen["early"])
    if "operators" in seen.get("vllm", {}):
        yield _operators(seen["vllm"]["operators"])
    yield _start_method(seen)
    yield _devices(seen)
    yield _shared_memory()
    yield _disk(output_dir)


def environment(versions: Versions) -> Iterator[Finding]:
    """What is installed and set. Imports neither torch, vLLM nor speculators."""
    yield Finding("python", "ok", f"{platform.python_version()} {sys.executable}")
    memory = human(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield Finding("system", "ok", f"{platform.platform()}, {counted(os.cpu_count() or 1, 'CPU')}, {memory}")
    yield Finding("shim", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    for installed in versions:
        where = f" in {installed.location}" if installed.location else ""
        missing = "" if installed.present else f"pip install {installed.module}"
        yield Finding(installed.module, "fail" if missing else "ok", f"{installed}{where}", missing)
    yield Finding("packages", "ok", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    yield Finding("variables", "ok", "\n".join(_variables()) or "none of ours, vLLM's, the hub's or CUDA's is set")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _variables() -> list[str]:
    named = [name for name in sorted(os.environ) if name.startswith(VARIABLES)]
    return [f"{name}={os.environ[name]}" for name in named if not any(word in name for word in SECRET)]


def gpus() -> str:
    """GPUs and driver as nvidia-smi names them; empty where there is none."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join((done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines())


def _pair(versions: Versions) -> Finding:
    try:
        support.require(versions)
    except CompatError as error:
        return Finding("pair", "fail", str(error))
    if support.is_tested(versions):
        return Finding("pair", "ok", "this pair of vLLM and speculators is tested")
    return Finding("pair", "warn", support.untested_sentence(versions), "Run `preflight` with your model.")


def _wrapt() -> Finding:
    from packaging.version import Version

    found = _version("wrapt")
    if Version(found) >= Version(WRAPT):
        return Finding("wrapt", "ok", found)
    return Finding("wrapt", "fail", f"expected wrapt {WRAPT} or newer; found {found}", f"pip install 'wrapt>={WRAPT}'")


def _torch_of_vllm(versions: Versions) -> Finding:
    """vLLM's compiled parts fit one torch."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    for name in importlib.metadata.packages_distributions().get("vllm", []):
        needs = [need for need in map(Requirement, importlib.metadata.requires(name) or []) if need.name == "torch"]
        for pinned in (Version(pin.version) for need in needs for pin in need.specifier if pin.operator == "=="):
            reason, found = f"{name} was built for torch {pinned}", versions.torch.text
            if found is None or pinned.base_version == Version(found).base_version:
                return Finding("torch_pin", "ok", reason)
            reason += f"; found {found}: compiled parts will not load"
            return Finding("torch_pin", "fail", reason, f"pip install torch=={pinned.public}")
    return Finding("torch_pin", "ok", "vLLM names no single torch")


def _plugin() -> Finding:
    names = sorted(entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins"))
    allowed = os.environ.get("VLLM_PLUGINS")
    if PLUGIN not in names:
        reason = f"vLLM does not see our entry point: no installed copy. {BESIDE}"
        return Finding("plugin", "warn", reason, "pip install spec-vllm-compat")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        reason = f"VLLM_PLUGINS={allowed} shuts our plugin out. {BESIDE}"
        return Finding("plugin", "warn", reason, f"Add {PLUGIN} to VLLM_PLUGINS, or unset it.")
    return Finding("plugin", "ok", f"visible to vLLM among {', '.join(names)}")


def _probe() -> tuple[dict[str, Any], str | None]:
    """What the imports show, from a process of its own, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "seen.json")
        asked = [sys.executable, "-m", "spec_vllm_compat.cli.probe", str(output)]
        problem = None
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                problem = f"the process ended with exit code {exit_code(done.returncode)}: {' '.join(done.stderr.split())[-400:]}"
        except subprocess.TimeoutExpired:
            problem = "nothing came back within five minutes"
        seen = json.loads(output.read_text()) if output.exists() else {}
    return seen, problem and f"importing speculators and vLLM failed; {problem}"


def _generator(seen: dict[str, Any], early: list[str]) -> Iterator[Finding]:
    if "error" in seen:
        reason = f"the generator cannot be imported: {seen['error']} (at {seen['at']})"
        yield Finding("patch_sets", "fail", reason, "If a package is missing, install it; else report this text.")
        return
    if seen["failure"]:
        yield Finding("patch_sets", "fail", seen["failure"])
        return
    applied = [sentence for _, is_applied, sentence, _ in seen["patches"] if is_applied]
    others = [name for name, is_applied, _, _ in seen["patches"] if not is_applied]
    text = f"{len(applied)} applied" + (f", not needed: {', '.join(others)}" if others else "")
    disagree = any(patch[3] for patch in seen["patches"])
    yield Finding("patch_sets", "warn" if disagree else "ok", "\n".join([text, *applied]))
    if "speculators" in early:
        reason = "something imports speculators when Python starts (a .pth file, sitecustomize)"
        yield Finding("hook_order", "fail", reason, "Look with `python -X importtime -c pass`.")
    else:
        yield Finding("hook_order", "ok", f"the generator is patched when it is imported ({seen['file']})")


def _operators(missing: str) -> Finding:
    if not missing:
        return Finding("operators", "ok", "vLLM's compiled operators are loaded")
    reason = f"vLLM's compiled operators did not load: {missing}. Most models will fail at their first forward pass."
    return Finding("operators", "warn", reason, "Install a vLLM that was built for this system and this torch.")


def _start_method(seen: dict[str, Any]) -> Finding:
    method, vllm = os.environ.get(METHOD), seen.get("vllm", {})
    cuda = vllm.get("device") == "cuda"
    if method == "fork" and cuda:
        reason = f"{METHOD}=fork: forked workers cannot use CUDA after speculators' import"
        return Finding("processes", "fail", reason, f"unset {METHOD}")
    chosen = method or ("spawn (chosen by the shim)" if cuda else "vLLM's choice")
    return Finding("processes", "ok", f"start method: {chosen}; model runner {'V2' if vllm.get('v2_runner') else 'V1'}")


def _devices(seen: dict[str, Any]) -> Finding:
    torch, by_driver = seen.get("torch", {}), gpus()
    if "error" in torch:
        return Finding("devices", "fail", f"torch: {torch['error']}", "Install the torch that vLLM was built for.")
    if torch.get("devices"):
        listed = "; ".join(f"{name}, {human(free)} of {human(total)} free" for name, free, total in torch["devices"])
        return Finding("devices", "ok", f"{listed}. nvidia-smi: {by_driver or 'not there'}")
    if torch.get("cuda_build") and by_driver:
        reason = f"nvidia-smi sees {by_driver}, torch {torch['version']} sees no GPU"
        return Finding("devices", "fail", reason, "Driver and CUDA build do not fit, or CUDA_VISIBLE_DEVICES is empty.")
    return Finding("devices", "ok", f"no GPU; vLLM's platform is {seen.get('vllm', {}).get('device', 'unknown')}")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        reason = f"/dev/shm cannot be used: {error}"
        return Finding("dev_shm", "fail", reason, "vLLM's processes talk through it; mount it.")
    return _space("dev_shm", "/dev/shm", free, 1e9, "Containers start with 64 MB; use --ipc=host or --shm-size=8g.")


def _disk(folder: Path) -> Finding:
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    remedy = "An 8B model with four layers writes 32 KB a token; `preflight` computes it."
    return _space("disk", str(place), shutil.disk_usage(place).free, 10e9, remedy)


def _space(name: str, place: str, free: int, least: float, remedy: str) -> Finding:
    text = f"{human(free)} free at {place}"
    return Finding(name, "warn", text, remedy) if free < least else Finding(name, "ok", text)
