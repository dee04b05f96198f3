"""What `import spec_vllm_compat` costs a process: by itself, and one that imports vLLM but never extracts.

    python benchmarks/import_time.py OUT.json [--runs 20] [--skip-vllm]

Every pair takes turns, one process at a time; what is reported is the median and the spread of either side, and of the
differences within a turn, of the time that passes and of processor time, which other processes disturb less. A difference
smaller than the spread of one side is no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PAIRS = {
    "bare": ("pass", "import spec_vllm_compat"),
    "vllm": ("from vllm import LLM", "import spec_vllm_compat\nfrom vllm import LLM"),
}
#: Seconds of the import itself, measured inside, and what one more finder costs each import of any other module.
INSIDE = """
import time
begin = time.perf_counter()
import spec_vllm_compat
took = time.perf_counter() - begin
import timeit
from spec_vllm_compat.registry import _GATE
print(took, timeit.timeit(lambda: _GATE.find_spec("vllm.config", None, None), number=100000) / 100000)
"""


def run(code: str) -> dict[str, Any]:
    """Milliseconds that passed, milliseconds of processor time, and what was printed."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    printed = process.stdout.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {code}")
    elapsed = 1000 * (time.perf_counter() - begin)
    return {"elapsed": elapsed, "processor": 1000 * (used.ru_utime + used.ru_stime), "printed": printed}


def spread(values: list[float]) -> dict[str, Any]:
    rounded = [round(value, 2) for value in values]
    return {
        "median": round(statistics.median(rounded), 2),
        "lowest": min(rounded),
        "highest": max(rounded),
        "all": rounded,
    }


def pair(without: str, with_us: str, runs: int) -> dict[str, Any]:
    run(without), run(with_us)  # fills the caches of the file system
    times = [(run(without), run(with_us)) for _ in range(runs)]
    return {
        f"{clock}_ms": {
            "without": spread([one[clock] for one, _ in times]),
            "with": spread([other[clock] for _, other in times]),
            "difference": spread([other[clock] - one[clock] for one, other in times]),
        }
        for clock in ("elapsed", "processor")
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--skip-vllm", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process would compile us anew
    inside = [[float(number) for number in run(INSIDE)["printed"].split()] for _ in range(options.runs)]
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "runs": options.runs,
        "import_ms": spread([1000 * took for took, _ in inside]),
        "finder_us_an_import": round(1e6 * statistics.median(each for _, each in inside), 3),
    }
    for name, codes in PAIRS.items():
        if name == "bare" or not options.skip_vllm:
            report[name] = pair(*codes, options.runs)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"the import itself: {report['import_ms']['median']} ms; each later import: {report['finder_us_an_import']} us more"
    )
    for name in PAIRS:
        for clock, sides in report.get(name, {}).items():
            print(name, clock, {side: values["median"] for side, values in sides.items()})


if __name__ == "__main__":
    main()
