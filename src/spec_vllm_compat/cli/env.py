"""``env``: what is installed and what is set, for bug reports; read without importing torch, vLLM or speculators."""

from __future__ import annotations

import click

from spec_vllm_compat.cli.doctor import environment, gpus
from spec_vllm_compat.versions import detect


@click.command("env", short_help="Versions for a bug report.")
def command() -> None:
    """Print what is installed and set, for a bug report: the facts of `doctor`, without its checks."""
    click.echo("```")
    for finding in environment(detect()):
        first, *more = finding.reason.splitlines()
        click.echo("\n".join([f"{finding.id:12}  {first}", *(f"{'':12}  {line}" for line in more)]))
    click.echo(f"{'gpus':12}  {gpus() or 'none that nvidia-smi names'}\n```")
