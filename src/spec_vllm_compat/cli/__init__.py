"""The command line: ``spec-vllm-compat`` and ``python -m spec_vllm_compat``. One module a command.

click and nothing else is needed to start; torch, vLLM and speculators are imported by the commands that need them.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from spec_vllm_compat._version import __version__
from spec_vllm_compat.errors import CompatError

_COMMANDS = ("doctor", "preflight", "extract", "verify", "convert", "run", "env")

HELP = """Hidden states for EAGLE-3 training with speculators 0.3 and 0.4 on the vLLM that is installed.

\b
From conversations to a trained draft model:
  1. doctor                   seconds: is this environment sound?
  2. preflight MODEL          a minute: will this model work? A small copy of it goes through the real pipeline.
  3. extract ...              the job; can be killed and started again at any time.
  4. verify DIR               is every sample there, whole and right?
  5. train                    speculators' own trainer reads DIR as it is; speculators 0.5 and newer after `convert`.

\b
Have a script of your own, or speculators' scripts/data_generation_offline.py?
  run SCRIPT ARGS...          runs it unmodified, with the shim in place first.

Every command has --help. Exit status: 0 good, 1 something is wrong, 2 wrong usage.
"""


class Lazy(click.Group):
    """Imports the module of a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"spec_vllm_compat.cli.{cmd_name}").command
        return command


@click.group(cls=Lazy, help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, package_name="spec_vllm_compat")
def cli() -> None:
    pass


def main(args: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 0, 1 or 2."""
    try:
        sys.exit(cli.main(args, prog_name="spec-vllm-compat", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CompatError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except click.Abort:  # Ctrl-C
        click.echo("interrupted", err=True)
        sys.exit(130)
