"""Progress of a long job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

INTERVAL = 10.0  # seconds between plain lines


def human(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


@dataclass
class Progress:
    """Counts what is done. ``total`` and ``total_tokens`` are what this run has to do."""

    total: int
    total_tokens: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    _said: float = 0.0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def add(self, *, done: int = 0, failed: int = 0, tokens: int = 0, size: int = 0) -> None:
        self.done += done
        self.failed += failed
        self.tokens += tokens
        self.bytes += size

    def line(self) -> str:
        rate = self.tokens / self.seconds
        left = clock((self.total_tokens - self.tokens) / rate) if rate else "?"
        return (
            f"{self.done + self.failed:,}/{self.total:,} samples | ok {self.done:,} failed {self.failed:,} | "
            f"{rate:,.0f} tokens/s | {human(self.bytes)} written | left {left}"
        )

    def show(self, *, last: bool = False) -> None:
        """Say how far it is; on a terminal over the last line, elsewhere at most every ten seconds."""
        now = time.monotonic()
        if sys.stderr.isatty():
            width = 20
            full = int(width * (self.done + self.failed) / max(self.total, 1))
            sys.stderr.write(f"\r\x1b[K[{'#' * full}{'.' * (width - full)}] {self.line()}" + ("\n" if last else ""))
        elif last or now - self._said >= INTERVAL:
            sys.stderr.write(self.line() + "\n")
        else:
            return
        self._said = now
        sys.stderr.flush()
