"""What the commands print: sizes, counts, long lists, and tqdm's bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

clock = tqdm.format_interval  # seconds as [h:]mm:ss


def human(size: float) -> str:
    return str(tqdm.format_sizeof(size, "B"))


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown(lines: Sequence[str], most: int) -> list[str]:
    """The first lines, and how many more there are."""
    return [*lines[:most], *([f"... and {len(lines) - most:,} more"] if len(lines) > most else [])]


class Bar(tqdm):
    """tqdm, whose lines end off a terminal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pause = 0.2 if sys.stderr.isatty() else 10
        super().__init__(*args, miniters=1, mininterval=pause, dynamic_ncols=True, disable=False, **kwargs)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            printer: Callable[[str], None] = tqdm.status_printer(file)
            return printer
        return lambda text: print(text, file=file, flush=True)


class Progress(Bar):
    """Of an extraction: counts tokens, because samples differ in length, and beside them samples and bytes."""

    def __init__(self, tokens: int, samples: int) -> None:
        self.samples, self.done, self.failed, self.bytes = samples, 0, 0, 0
        bar = "{bar:20} " if sys.stderr.isatty() else ""
        shape = "{percentage:3.0f}% " + bar + "{desc} | {rate_noinv_fmt} | left {remaining}"
        super().__init__(desc=self._counts(), total=tokens, unit=" tokens", unit_scale=True, bar_format=shape)

    def _counts(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.done:,} of {counted(self.samples, 'sample')}{failed}, {human(self.bytes)}"

    def add(self, *, tokens: int = 0, done: int = 0, failed: int = 0, size: int = 0) -> None:
        self.done, self.failed, self.bytes = self.done + done, self.failed + failed, self.bytes + size
        self.desc = self._counts()
        self.update(tokens)

    @property
    def seconds(self) -> float:
        return max(time.time() - float(self.start_t), 1e-9)
