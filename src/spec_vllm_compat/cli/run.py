"""``run``: an unmodified script with the shim in place first, in it and in every Python process that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

HELP = """Run SCRIPT (or -m MODULE) unmodified, as `python SCRIPT` would, with the shim in place first.

All that follows belongs to the script. Children have the shim too: spawned processes, subprocesses, torchrun.

\b
  spec-vllm-compat run scripts/data_generation_offline.py --target-model-path Qwen/Qwen3-8B ...
  spec-vllm-compat run -m my_package.extract --config run.toml
"""

#: Holds the ``sitecustomize`` that every Python process finds that is started from here.
CHILDREN = Path(__file__).parent / "children"


@click.command(
    "run",
    help=HELP,
    short_help="Run a script with the shim in place.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
@click.argument("arguments", metavar="[-m MODULE | SCRIPT] [ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
    if first.startswith("-") if first != "-m" else len(arguments) < 2:
        raise click.UsageError(f"expected a script, or -m and a module; found {' '.join(arguments[:2])}")
    if first != "-m" and not Path(first).is_file():
        raise click.UsageError(f"{first or 'no argument'}: expected a Python script, or -m and a module; found none")
    if sys.flags.ignore_environment:
        raise click.UsageError("the shim is brought in through PYTHONPATH, which python -E and -I ignore")
    paths = [str(CHILDREN), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SPEC_VLLM_COMPAT_RUN": sys.executable}
    os.execve(sys.executable, [sys.executable, *arguments], variables)
