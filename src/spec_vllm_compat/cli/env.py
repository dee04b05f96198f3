"""``env``: the versions block for bug reports."""

from __future__ import annotations

import click

from spec_vllm_compat.cli import environment


@click.command("env", short_help="Versions for a bug report.")
def command() -> int:
    """Print what is installed and set, for a bug report. Imports neither torch nor vLLM."""
    facts = {**environment.machine(), **environment.packages(), **environment.variables()}
    width = max(map(len, facts))
    click.echo("```")
    for name, text in facts.items():
        click.echo(f"{name:{width}}  {text}")
    click.echo("```")
    return 0
