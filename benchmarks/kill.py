"""What is left when the driver is killed with SIGKILL at a random moment: no process and no memory may be.

    python benchmarks/kill.py OUT.json [--times 10] [--seed 0] [--append]

A third of the kills come while the engine starts, the others in the middle of calls. Every process that the driver started
is in its session, so none is overlooked; which names in /dev/shm and which memory files belong to them is read from their
maps just before. vLLM's own message queues have names (psm_*), ours have none; both are looked for. Exit code 1: something was
left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import random_model

#: Seconds in which everything must have gone: vLLM's workers look for their parent once they have started, and after a step.
PATIENCE = 120


def processes(session: int) -> list[int]:
    """Every process of a session that has not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _parent, _group, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(folder.name))
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Names of files in /dev/shm and of memory files that these processes have mapped."""
    names: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        names |= set(re.findall(r"(/dev/shm/\S+|/memfd:spec_vllm_compat)", maps))
    return names


def drive(model: Path, calls: int) -> None:
    """The driver: call after call, some results kept. Never returns."""
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(str(model), layer_ids=[1, 3], max_model_len=2048, gpu_memory_utilization=0.3)
    kept: list[Any] = []
    while True:
        kept = [*kept[-3:], generator.generate([list(range(3, 500)) * 3] * 4)]
        os.write(calls, b".")


def start(model: Path) -> tuple[int, int]:
    """A driver in a session of its own, forked after the imports; its process id and where it tells of its calls."""
    calls, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, calls
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        drive(model, write)
    finally:
        os._exit(1)


def one(model: Path, rng: random.Random, starting: bool) -> dict[str, Any]:
    driver, calls = start(model)
    began = time.monotonic()
    try:
        if starting:
            time.sleep(rng.uniform(0.1, 10))
        else:
            if not select.select([calls], [], [], 300)[0] or not os.read(calls, 1):
                raise RuntimeError("the driver ended by itself or did not get to its first call")
            time.sleep(rng.uniform(0, 1.5))
        alive = processes(driver)
        memory = shared_memory(alive)
        generating = bool(select.select([calls], [], [], 0)[0]) or not starting
    finally:
        os.kill(driver, signal.SIGKILL)
        killed = time.monotonic()
        _, status = os.waitpid(driver, 0)
        os.close(calls)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the driver ended by itself")
    while processes(driver) and time.monotonic() < killed + PATIENCE:
        time.sleep(0.1)
    left = processes(driver)
    result = {
        "after_seconds": round(killed - began, 2),
        "while": "generating" if generating else "starting",
        "processes": len(alive),
        "mapped": sorted({name.split(":")[-1].split("/")[-1][:20] for name in memory}),
        "gone_after_seconds": round(time.monotonic() - killed, 2),
        "processes_left": len(left),
        "memory_left": sorted(name for name in memory if name.startswith("/dev/shm") and os.path.exists(name))
        + sorted(shared_memory(left)),
    }
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="add to the kills that OUT.json has already")
    options = parser.parse_args()
    kills: list[dict[str, Any]] = json.loads(options.out.read_text())["kills"] if options.append else []
    rng = random.Random(options.seed)
    import spec_vllm_compat  # noqa: F401, I001 - before speculators
    import speculators.data_generation  # noqa: F401 - once here, not in every driver

    with tempfile.TemporaryDirectory() as folder:
        model = random_model.build(Path(folder))
        for number in range(options.times):
            kills.append(one(model, rng, starting=number % 3 == 0))
            print(json.dumps(kills[-1]), flush=True)
            left = [kill for kill in kills if kill["processes_left"] or kill["memory_left"]]
            report = {
                "kills": len(kills),
                "in_the_middle_of_calls": sum(kill["while"] == "generating" for kill in kills),
                "with_something_left": len(left),
                "longest_until_gone_seconds": max(kill["gone_after_seconds"] for kill in kills),
            }
            options.out.write_text(json.dumps({"summary": report, "kills": kills}, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
