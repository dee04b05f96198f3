"""What `import spec_vllm_compat` costs a process: by itself, and one that imports vLLM but never extracts.

    python benchmarks/import_time.py OUT.json [--runs 20] [--skip-vllm]

Every pair takes turns, one process at a time; what is reported is the median and the spread of either side, and the median
of the differences within a turn. A difference smaller than the spread of one side is no difference.
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


def run(code: str) -> tuple[float, str]:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin, done.stdout.decode()


def milliseconds(seconds: list[float]) -> dict[str, Any]:
    rounded = [round(1000 * value, 2) for value in seconds]
    return {"median": statistics.median(rounded), "lowest": min(rounded), "highest": max(rounded), "all": rounded}


def pair(without: str, with_us: str, runs: int) -> dict[str, Any]:
    run(without), run(with_us)  # fills the caches of the file system
    times = [(run(without)[0], run(with_us)[0]) for _ in range(runs)]
    return {
        "without_ms": milliseconds([one for one, _ in times]),
        "with_ms": milliseconds([other for _, other in times]),
        "difference_ms": milliseconds([other - one for one, other in times]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--skip-vllm", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    inside = [[float(number) for number in run(INSIDE)[1].split()] for _ in range(options.runs)]
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "runs": options.runs,
        "import_ms": milliseconds([took for took, _ in inside]),
        "finder_us_an_import": round(1e6 * statistics.median(each for _, each in inside), 3),
    }
    for name, codes in PAIRS.items():
        if name == "bare" or not options.skip_vllm:
            report[name] = pair(*codes, options.runs)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "vllm"}, indent=1))


if __name__ == "__main__":
    main()
