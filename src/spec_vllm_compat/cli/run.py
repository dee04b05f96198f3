"""``run``: an unmodified script with the shim in place first, in it and in every Python process that it starts."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import click

HELP = """Run SCRIPT (or with -m MODULE) unmodified, as `python SCRIPT` would, with the shim in place first.

All that follows belongs to the script. Children have the shim too: spawned processes, subprocesses, torchrun.

\b
  spec-vllm-compat run scripts/data_generation_offline.py --target-model-path Qwen/Qwen3-8B ...
  spec-vllm-compat run -m my_package.extract --config run.toml
"""

#: Holds the ``sitecustomize`` that children find.
CHILDREN = Path(__file__).parent / "children"

_replaced: list[ModuleType] = []  # the main module that ours was; its globals must outlive this call


class _Rest(click.Command):
    """Leaves everything after the script's or the module's name to it, ``--help`` too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "-m" and len(args) > 1:
            args = [*args[:2], "--", *args[2:]]
        return super().parse_args(ctx, args)


@click.command(
    "run",
    help=HELP,
    short_help="Run a script with the shim in place.",
    cls=_Rest,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE` would.")
@click.argument("arguments", metavar="[SCRIPT] [ARGS...]", nargs=-1, type=click.UNPROCESSED)
def command(module: str | None, arguments: tuple[str, ...]) -> Callable[[], None]:
    if module is None and not arguments:
        raise click.UsageError("name a script, or a module with -m")
    if module is None and not Path(arguments[0]).is_file():
        raise click.UsageError(f"{arguments[0]}: expected a Python script; found no such file")

    def start() -> None:
        import spec_vllm_compat  # noqa: F401 - before anything of the script

        reach_children()
        if module is None:
            run_script(arguments[0], arguments[1:])
        else:
            run_module(module, arguments)

    return start


def reach_children() -> None:
    """Let every Python process that is started from here import the shim first."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(CHILDREN) not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILDREN), *filter(None, folders)])


def run_script(script: str, arguments: tuple[str, ...]) -> None:
    """Execute a file as ``__main__``; spawned children import it by its path, as always."""
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    sys.argv[:] = [script, *arguments]
    _execute(code, os.path.dirname(os.path.realpath(path)), __file__=path, __loader__=loader)


def run_module(name: str, arguments: tuple[str, ...]) -> None:
    """Execute a module or a package's ``__main__`` as ``__main__``; spawned children import it by its name."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # before the search: the module may lie there
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        sys.exit(f"{sys.executable}: No module named {name}, or nothing in it to run")
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    sys.argv[:] = [spec.origin or name, *arguments]
    _execute(
        code, os.getcwd(), __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent
    )  # fmt: skip


def _execute(code: CodeType, folder: str, **attributes: Any) -> None:
    module = ModuleType("__main__")
    vars(module).update({"__builtins__": builtins, "__spec__": None, "__package__": None, **attributes})
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    exec(code, vars(module))
