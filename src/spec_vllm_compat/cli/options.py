"""``--layer-ids 2 30 58 60``, as speculators' own script takes it; click itself knows no option with many values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

MANY = "--layer-ids"


class ManyValues(click.Command):
    """Reads ``--layer-ids 2 30 58 60`` as ``--layer-ids 2 --layer-ids 30 ...``; commas are taken too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        inside = False
        for argument in args:
            if argument == MANY:
                inside = True
            elif inside and argument.replace(",", "").isdigit():
                for value in argument.split(","):
                    spread += [MANY, value]
            elif argument.startswith(f"{MANY}="):
                for value in argument.removeprefix(f"{MANY}=").split(","):
                    spread += [MANY, value]
            else:
                inside = False
                spread.append(argument)
        return super().parse_args(ctx, spread)


def layer_ids_option(text: str) -> Callable[[Any], Any]:
    return click.option(MANY, "layer_ids", multiple=True, type=int, metavar="K K K ...", help=text)
