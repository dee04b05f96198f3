"""``--layer-ids 2 30 58 60``, as speculators' own script takes it; click itself knows no option with many values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class ManyValues(click.Command):
    """Reads ``--layer-ids 2 30 58 60`` as ``--layer-ids 2,30,58,60``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for argument in args:
            if joined[-2:-1] == ["--layer-ids"] and argument.isdigit():
                joined[-1] += f",{argument}"
            else:
                joined.append(argument)
        return super().parse_args(ctx, joined)


def _layers(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split(","))) if value else ()
    except ValueError:
        raise click.BadParameter(f"expected layer numbers; found {value!r}") from None


def layer_ids_option(text: str) -> Callable[[Any], Any]:
    return click.option("--layer-ids", default="", metavar="K K K ...", callback=_layers, show_default=False, help=text)
