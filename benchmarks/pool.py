"""How often the pool of buffers needs fresh memory, for calls of unlike length. Simulated: no engine, no time.

    python benchmarks/pool.py OUT.json

Each call takes the sum of 8 random lengths; a script holds the results of the last few calls while it saves them. Fresh
memory costs about as much as computing what it will hold, so its share of the calls is about what is lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

from spec_vllm_compat.driver import buffers

CALLS = 1000


class Counted:
    """A buffer without memory."""

    segment = None

    def __init__(self, size: int) -> None:
        self.size, self.idle = size, 0
        made.append(size)

    def array(self) -> Any:
        return Handle()

    def close(self) -> None:
        closed.append(self.size)


class Handle:
    pass


made: list[int] = []
closed: list[int] = []


def simulate(held: int, idle: int, rounded: bool) -> dict[str, Any]:
    made.clear()
    closed.clear()
    originals = buffers.Buffer, buffers.IDLE_CALLS, buffers._rounded
    buffers.Buffer, buffers.IDLE_CALLS = Counted, idle  # type: ignore[assignment, misc]
    if not rounded:
        buffers._rounded = lambda size: size
    try:
        pool, rng, keep, most = buffers.BufferPool(), random.Random(0), [], 0
        for _ in range(CALLS):
            size = sum(rng.randrange(400, 2049) for _ in range(8)) * 32768
            keep = [*keep, pool.take(size)[1]][-held:]
            most = max(most, sum(made) - sum(closed))
    finally:
        buffers.Buffer, buffers.IDLE_CALLS, buffers._rounded = originals
    return {
        "calls_held": held,
        "freed_after": idle,
        "rounded": rounded,
        "fresh_buffers": len(made),
        "percent_of_calls": round(100 * len(made) / CALLS, 2),
        "most_memory_mb": round(most / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rows = [simulate(*way) for way in itertools.product((1, 2, 3, 5), (8, 64), (False, True))]
    for row in rows:
        print(row)
    options.out.write_text(json.dumps({"calls": CALLS, "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
