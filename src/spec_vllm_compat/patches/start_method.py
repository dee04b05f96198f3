"""On CUDA, workers must be spawned once speculators is imported; vLLM forks by default."""

from __future__ import annotations

import ast
import logging
import multiprocessing.spawn
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_vllm_compat.errors import PatchError
from spec_vllm_compat.records import Kind, Record
from spec_vllm_compat.seams import Change, Members, Mixin, PatchSet, Probe, SeamMissing, Target

RECORD = Record(
    id="start_method",
    kind=Kind.PLATFORM,
    why=(
        "On CUDA, vLLM forks by default, and every worker dies with «Cannot re-initialize CUDA in forked subprocess»: "
        "`import speculators` 0.3 runs a module-level `@torch.compile` that makes torch look for CUDA, while "
        "`torch.cuda.is_initialized()` still says False, so vLLM does not switch by itself. Spawned workers import the "
        "user's script; where it has no `if __name__ == '__main__'` the generator would start itself again, so such a "
        "script is kept from them, as under fork."
    ),
    changed="speculators 0.3.0 models/eagle3/core.py; vLLM's default start method has always been fork",
    source="speculators 223 sets spawn in its tests; vllm/utils/system_utils.py `_maybe_force_spawn`",
    vllm=">=0.11",
    speculators=">=0.3,<0.5",
    probed_by="at start-up: VLLM_WORKER_MULTIPROC_METHOD, vLLM's platform, and a forked child that looks whether CUDA is lost",
    remove_when="never while speculators' in-process generator is supported",
)

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
logger = logging.getLogger("spec_vllm_compat")


class StartMethod(Mixin):
    """Starts workers in a way that works, or says why the user's choice cannot."""

    def _init_executor(self) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cuda_alike():
            _choose()
        with _main_kept_from_children():
            super()._init_executor()


def _choose() -> None:
    chosen = os.environ.get(METHOD)
    if chosen is None:
        os.environ[METHOD] = "spawn"
        logger.info("%s=spawn: forked workers cannot use CUDA once speculators is imported", METHOD)
    elif chosen == "fork" and _cuda_is_lost_in_a_fork():
        raise PatchError(
            RECORD.id,
            expected="worker processes that can use CUDA",
            found=f"{METHOD}=fork, and CUDA was looked for in this process already, so forked workers cannot use it",
            remedy=f"Unset {METHOD} or set it to spawn.",
        )


def _cuda_is_lost_in_a_fork() -> bool:
    """Ask a forked child: nothing in the parent tells."""
    import torch

    child = os.fork()
    if child == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@contextmanager
def _main_kept_from_children() -> Iterator[None]:
    """While workers start, keep a main script without a ``__main__`` guard from being imported by them."""
    original = multiprocessing.spawn.get_preparation_data
    if _main_is_guarded():
        yield
        return

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in original(name).items() if not key.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original


def _main_is_guarded() -> bool:
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None:  # `python -c`, notebooks: children have nothing to import
        return True
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Name) and part.id == "__name__" for part in (node.left, *node.comparators))
        for node in ast.walk(tree)
    )


def _probe(target: Target) -> Probe:
    if not hasattr(target.bound("MultiprocExecutor"), "_init_executor"):
        raise SeamMissing("MultiprocExecutor._init_executor", "no such method")
    return Probe(True, f"{METHOD}={os.environ.get(METHOD, 'not set')}")


def _changes(_target: Target) -> tuple[Change, ...]:
    return (Members("MultiprocExecutor", StartMethod),)


PATCH_SET = PatchSet(RECORD, _probe, _changes)
