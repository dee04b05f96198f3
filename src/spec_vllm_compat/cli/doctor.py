"""``doctor``: is this environment sound? Seconds, loads no model."""

from __future__ import annotations

import importlib.metadata
import json
import os
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

from spec_vllm_compat import support
from spec_vllm_compat.cli import environment
from spec_vllm_compat.cli.progress import human
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.registry import SWITCH
from spec_vllm_compat.versions import Versions, detect

PLUGIN = "spec_vllm_compat"
WRAPT = "1.16"  # as in pyproject.toml
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is empty where nothing is to be done."""

    id: str
    status: str  # ok, warn or fail
    reason: str
    remedy: str = ""


@click.command("doctor", short_help="Check the environment in seconds.")
@click.option(
    "--output-dir", type=click.Path(path_type=Path), default=Path(), help="Where samples will go; default here."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(output_dir: Path, as_json: bool) -> int:
    """Check this environment, without loading a model: versions, patch sets, plugins, devices, memory, disk.

    The output is made to be pasted into a bug report. Exit status 1 if a check fails.
    """
    findings = list(examine(output_dir))
    failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(_text(finding))
        warned = sum(finding.status == "warn" for finding in findings)
        click.echo(f"{len(findings)} checks: {failed} fail, {warned} warn")
    return 1 if failed else 0


def _text(finding: Finding) -> str:
    head = f"{finding.status if finding.status != 'fail' else 'FAIL':4}  {finding.id:14}  "
    body = finding.reason + (f"\n-> {finding.remedy}" if finding.remedy else "")
    wrapper = textwrap.TextWrapper(120 - len(head), break_on_hyphens=False, break_long_words=False)
    lines = [line for part in body.splitlines() for line in wrapper.wrap(part)]
    return head + ("\n" + " " * len(head)).join(lines)


def examine(output_dir: Path) -> Iterator[Finding]:
    """All findings, in order."""
    versions = detect()
    yield Finding("python", "ok", environment.machine()["python"])
    yield _switch()
    pair = list(_pair(versions))
    yield from pair
    yield _wrapt()
    yield _torch_of_vllm(versions)
    yield _plugin()
    seen, problem = _probe() if versions.vllm.present and versions.speculators.present else ({}, None)
    if problem:
        yield Finding("imports", "fail", problem, "Run `python -c 'import vllm, speculators'` and look at its error.")
    if pair[-1].status == "fail":
        yield Finding("patch_sets", "fail", "not decided: see pair")
    else:
        yield from _imports(seen)
    yield _start_method(seen)
    yield _devices(seen)
    yield _shared_memory()
    yield _disk(output_dir)


def _switch() -> Finding:
    value = os.environ.get(SWITCH, "")
    if value.lower() in {"off", "0", "false"}:
        return Finding("switch", "fail", f"{SWITCH}={value}: the shim changes nothing", f"unset {SWITCH}")
    return Finding("switch", "ok", f"{SWITCH} is {value or 'not set'}")


def _pair(versions: Versions) -> Iterator[Finding]:
    for installed in versions:
        where = f" in {installed.location}" if installed.location else ""
        status = "ok" if installed.present else "fail"
        remedy = "" if installed.present else f"pip install {installed.module}"
        yield Finding(installed.module, status, f"{installed}{where}", remedy)
    try:
        support.require(versions)
    except CompatError as error:
        yield Finding("pair", "fail", str(error))
        return
    if support.is_tested(versions):
        yield Finding("pair", "ok", "this pair of vLLM and speculators is tested")
    else:
        yield Finding("pair", "warn", support.untested_sentence(versions), "Run `preflight` with your model.")


def _wrapt() -> Finding:
    from packaging.version import Version

    found = importlib.metadata.version("wrapt")
    if Version(found) < Version(WRAPT):
        remedy = f"pip install 'wrapt>={WRAPT}'"
        return Finding("wrapt", "fail", f"expected wrapt {WRAPT} or newer; found {found}", remedy)
    return Finding("wrapt", "ok", found)


def _torch_of_vllm(versions: Versions) -> Finding:
    """vLLM's compiled parts fit one torch."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    names = importlib.metadata.packages_distributions().get("vllm", [])
    for name in names:
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            pinned = next((s.version for s in need.specifier if s.operator == "=="), None)
            if need.name != "torch" or pinned is None or versions.torch.text is None:
                continue
            if Version(pinned).base_version != Version(versions.torch.text).base_version:
                return Finding(
                    "torch_pin",
                    "fail",
                    f"{name} was built for torch {pinned}; found {versions.torch.text}: compiled parts will not load",
                    f"pip install torch=={Version(pinned).public}",
                )
            return Finding("torch_pin", "ok", f"{name} was built for torch {pinned}")
    return Finding("torch_pin", "ok", "vLLM names no single torch")


def _plugin() -> Finding:
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if PLUGIN not in names:
        return Finding(
            "plugin", "warn", "vLLM does not see our entry point: no installed copy. Workers are reached through their "
            "extension class all the same.", "pip install spec-vllm-compat",
        )  # fmt: skip
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return Finding(
            "plugin", "warn", f"VLLM_PLUGINS={allowed} shuts our plugin out. Workers are reached through their "
            "extension class all the same.", f"Add {PLUGIN} to VLLM_PLUGINS, or unset it.",
        )  # fmt: skip
    return Finding("plugin", "ok", f"visible to vLLM among {', '.join(sorted(names))}")


def _probe() -> tuple[dict[str, Any], str | None]:
    """What the imports show, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "seen.json")
        asked = [sys.executable, "-m", "spec_vllm_compat.cli.probe", str(output)]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
            ended = f"the process ended with {done.returncode}: {' '.join(done.stderr.split())[-400:]}"
        except subprocess.TimeoutExpired:
            done, ended = None, "nothing came back within five minutes"
        seen = json.loads(output.read_text()) if output.exists() else {}
    complete = done is not None and done.returncode == 0
    return seen, None if complete else f"importing speculators and vLLM failed; {ended}"


def _imports(seen: dict[str, Any]) -> Iterator[Finding]:
    generator = seen.get("generator")
    if generator is None:
        yield Finding("patch_sets", "fail", "not decided: see imports")
        return
    if "error" in generator:
        yield Finding(
            "patch_sets", "fail", f"the generator cannot be imported: {generator['error']} (at {generator['at']})",
            "If a package is missing, install it; else report this text.",
        )  # fmt: skip
        return
    if generator["failure"]:
        yield Finding("patch_sets", "fail", generator["failure"])
        return
    applied = [sentence for _, is_applied, sentence, _ in generator["patches"] if is_applied]
    others = [name for name, is_applied, _, _ in generator["patches"] if not is_applied]
    disagree = any(patch[3] for patch in generator["patches"])
    text = f"{len(applied)} applied" + (f", not needed: {', '.join(others)}" if others else "")
    yield Finding("patch_sets", "warn" if disagree else "ok", "\n".join([text, *applied]))
    if "speculators" in seen["early"]:
        yield Finding(
            "hook_order", "fail", "something imports speculators when Python starts (a .pth file, sitecustomize)",
            "Look with `python -X importtime -c pass`.",
        )  # fmt: skip
    else:
        yield Finding("hook_order", "ok", f"the generator is patched when it is imported ({generator['file']})")


def _start_method(seen: dict[str, Any]) -> Finding:
    method = os.environ.get(METHOD)
    device = seen.get("vllm", {}).get("device")
    runner = "V2" if seen.get("vllm", {}).get("v2_runner") else "V1"
    if method == "fork" and device == "cuda":
        return Finding("processes", "fail", f"{METHOD}=fork: forked workers cannot use CUDA after speculators' import",
                       f"unset {METHOD}")  # fmt: skip
    chosen = method or ("spawn (chosen by the shim)" if device == "cuda" else "vLLM's choice")
    return Finding("processes", "ok", f"start method: {chosen}; model runner {runner}")


def _devices(seen: dict[str, Any]) -> Finding:
    torch = seen.get("torch", {})
    if "error" in torch:
        return Finding("devices", "fail", f"torch: {torch['error']}", "Install the torch that vLLM was built for.")
    if torch.get("devices"):
        listed = "; ".join(f"{name}, {human(free)} of {human(total)} free" for name, free, total in torch["devices"])
        return Finding("devices", "ok", f"{listed}. {environment.gpus()}")
    device = seen.get("vllm", {}).get("device", "unknown")
    seen_by_driver = environment.gpus()
    if torch.get("cuda_build") and "none" not in seen_by_driver:
        return Finding(
            "devices", "fail", f"nvidia-smi sees {seen_by_driver}, torch {torch['version']} sees no GPU",
            "Driver and CUDA build do not fit, or CUDA_VISIBLE_DEVICES is empty.",
        )  # fmt: skip
    return Finding("devices", "ok", f"no GPU; vLLM's platform is {device}")


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(
            "dev_shm", "fail", f"/dev/shm cannot be used: {error}", "vLLM's processes talk through it; mount it."
        )
    text = f"/dev/shm: {human(usage.free)} of {human(usage.total)} free"
    if usage.free < 1e9:
        return Finding("dev_shm", "warn", text, "Containers start with 64 MB; use --ipc=host or --shm-size=8g.")
    return Finding("dev_shm", "ok", text)


def _disk(folder: Path) -> Finding:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    status = "warn" if free < 10e9 else "ok"
    remedy = "An 8B model with four layers writes 32 KB a token; `preflight` computes it." if status == "warn" else ""
    return Finding("disk", status, f"{human(free)} free at {place}", remedy)
