"""Try architectures one by one: a small seeded random checkpoint, the original generator, every row judged.

    python tools/architectures.py [NAME ...] [--out docs/architectures] [--timeout SECONDS] [--jobs N]

Each architecture runs in a process of its own: a checkpoint is built from the architecture's own configuration class, saved,
loaded through the unmodified ``VllmHiddenStatesGenerator``, and every row of every layer is compared with Transformers'
for the same checkpoint, in batches of mixed lengths that take several steps. The comparison must also tell the row from
those of the neighbouring layers and positions. Where rows differ, unpatched vLLM's own prompt log-probabilities judge:
they are compared with those that follow from the captured last layer, and with Transformers'. One result file an
architecture and vLLM version; ``tools/render_architectures.py`` makes the table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from architecture_list import ARCHITECTURES, VOCABULARY, Architecture

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "architectures"
LINE = "architecture "
STEP = 160  # tokens a scheduler step, so that the second batch takes several and splits prompts
BATCHES = ((1, 90, 7, 30, 2, 20), (200, 5, 130, 180, 61))
TOP = 20

#: Largest difference of a log-probability in nats, float32 against float32. Rounding is below 1e-4 for most models.
NATS = 2e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; default: all without a result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time; on GPUs they are shared out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return check(ARCHITECTURES[arguments.names[0]])
    from cell import versions

    about = {key: versions()[key] for key in ("vllm", "speculators", "torch", "transformers", "python", "machine")}
    found = gpus()
    about["device"] = found[0] if found else "cpu"
    turn = itertools.cycle(range(len(found) or 1))
    given = threading.Lock()

    def run(name: str) -> str:
        with given:  # as many GPUs as there are ranks, the next ones in turn
            mine = [next(turn) for _ in range(ARCHITECTURES[name].ranks)] if found else []
        result = {
            "name": name,
            **about,
            "architecture": ARCHITECTURES[name].title,
            **supervise(name, arguments.timeout, mine),
        }
        path = result_file(arguments.out, name, about)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {result['state']}; {result['note']} ({result['seconds']} s)", flush=True)
        return str(result["state"])

    names = arguments.names or [name for name in ARCHITECTURES if not result_file(arguments.out, name, about).exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        return int(not {"wrong", "undecided"}.isdisjoint(list(pool.map(run, names))))


def gpus() -> list[str]:
    """Names of the GPUs, asked of the driver's tool: this process must not start CUDA before its children."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.split("\n")[:-1]


def result_file(folder: Path, name: str, about: dict[str, Any]) -> Path:
    device = "" if about["device"] == "cpu" else "-" + re.sub(r"\W+", "-", about["device"].lower())
    return folder / f"{name}-vllm-{about['vllm']}-speculators-{about['speculators']}{device}.json"


def supervise(name: str, timeout: float, gpus: Sequence[int] = ()) -> dict[str, Any]:
    """Run one architecture in a child process; a crash or a hang is a result too."""
    began = time.monotonic()
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **ARCHITECTURES[name].environment,
        "PYTHONDONTWRITEBYTECODE": "",
    }
    if gpus:  # Triton's own default rounds float32 to tf32
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "TRITON_F32_DEFAULT": "ieee"}
    found: dict[str, Any] = {"state": "not run", "note": ""}
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        try:
            done = subprocess.run(
                [sys.executable, __file__, name, "--child"],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, timeout=timeout, check=False,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith(LINE)]
            said, ended = done.stdout, f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            lines, said, ended = [], "", f"no result within {timeout:.0f} s"
        stderr.seek(0)
        tail = [
            line.strip() for line in (said + stderr.read()).splitlines() if line.strip() and not line.startswith(LINE)
        ]
    if lines:
        found.update(json.loads(lines[-1].removeprefix(LINE)))
    else:
        found["note"] = " / ".join([ended, *tail[-3:]])[:600]
    if "WorkerProc initialization failed" in found["note"]:  # what the worker said is in its log only
        logged = [re.sub(r"^(\(.*?\)\s*)?(ERROR \S+ \S+ \[\S+\]\s*)?", "", line) for line in tail]
        errors = [line for line in logged if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        found["note"] = next((line for line in errors if "WorkerProc" not in line), found["note"])[:600]
    if found["state"] != "right" and os.environ.get("SHOW"):
        print(*tail[-80:], sep="\n")
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {**found, "seconds": round(time.monotonic() - began), "date": day}


# ---------------------------------------------------------------------------------------------- the child


def check(architecture: Architecture) -> int:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    found: dict[str, Any] = {"dtype": architecture.dtype, "environment": architecture.environment}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            architecture.build(path)
        except Exception as error:  # noqa: BLE001 - the installed packages may not know it
            found.update(state="not run", note=f"no checkpoint: {type(error).__name__}: {error}"[:600])
        else:
            found.update(extract(architecture, path))
    print(LINE + json.dumps(found), flush=True)
    return 0


def batches() -> list[list[list[int]]]:
    rng = random.Random(5)
    return [[[rng.randrange(3, VOCABULARY - 16) for _ in range(length)] for length in lengths] for lengths in BATCHES]


def share() -> float:
    """Part of the device's memory for an engine. Several of them may run on one GPU."""
    import torch

    return 0.04 if torch.cuda.is_available() else 0.3


def extract(architecture: Architecture, path: Path) -> dict[str, Any]:
    import spec_vllm_compat
    from spec_vllm_compat.cli.trial import use_states

    # isort: split
    from speculators.data_generation import vllm_hidden_states_generator as module

    original, smallest = module.ModelConfig, getattr(module, "MIN_MAX_BATCHED_TOKENS", None)
    module.ModelConfig = lambda **keywords: original(**{**keywords, "dtype": architecture.dtype})
    more: dict[str, Any] = {"tensor_parallel_size": architecture.ranks}
    if architecture.additional:  # the generator has no argument for it
        config = module.VllmConfig
        module.VllmConfig = lambda **keywords: config(**keywords, additional_config=architecture.additional)
    if architecture.expert_parallel:
        parallel = module.ParallelConfig
        module.ParallelConfig = lambda **keywords: parallel(**keywords, enable_expert_parallel=True)
    if smallest is not None:
        module.MIN_MAX_BATCHED_TOKENS = STEP
    else:
        more["max_num_batched_tokens"] = STEP
    generator = None
    layers = list(range(architecture.layers))
    try:
        generator = module.VllmHiddenStatesGenerator(
            str(path), layer_ids=layers, max_model_len=256, gpu_memory_utilization=share(), **more
        )
        generator.executor.collective_rpc(use_states)
        results = [result for batch in batches() for result in generator.generate(batch)]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        text = f"{type(error).__name__}: {error}".split("\nTraceback")[0]
        ours = isinstance(error, spec_vllm_compat.CompatError)
        ours &= "worker failed" not in text or "CaptureError" in text  # else it is the model itself that fails
        return {"state": "refused" if ours else "not run", "note": text[:600]}
    finally:
        module.ModelConfig = original
        if generator is not None:
            session = generator.executor.session
            said = {"container": session.capturing.container, "output": session.meaning}
            said["model_runner"] = session.ask(generator.executor, "identify")[0].model_runner
            generator.executor.shutdown()
    prompts = [ids for batch in batches() for ids in batch]
    return {**said, **judge(architecture, path, prompts, results)}


#: Bounds for the low precisions: the first that Transformers' own run in that dtype keeps in all but a tenth of the rows.
BOUNDS = (0.1, 0.2, 0.3)


def judge(architecture: Architecture, path: Path, prompts: list[list[int]], results: list[Any]) -> dict[str, Any]:
    import torch

    from reference import FLOAT32, row_error

    reference = architecture.reference(path)
    exact = architecture.dtype == "float32"
    low = None if exact else architecture.reference(path, architecture.dtype)
    own, found, near = [], [], []
    places = []
    for number, (ids, result) in enumerate(zip(prompts, results, strict=True)):
        want = reference(ids)
        rounded = low(ids) if low else {}
        assert len(want) == len(result["hidden_states"])
        for layer, got in enumerate(result["hidden_states"]):
            assert got.shape == want[layer].shape, f"layer {layer}: {got.shape} and {want[layer].shape}"
            size = want[layer].norm(dim=-1).clamp_min(1e-6)
            found.append((got.float() - want[layer]).norm(dim=-1) / size)
            own += [(rounded[layer].float() - want[layer]).norm(dim=-1) / size] if rounded else []
            places += [f"layer {layer}, row {row} of {len(ids)}, sequence {number}" for row in range(len(ids))]
            near += [row_error(got, want[other]) for other in (layer - 1, layer + 1) if 0 <= other < len(want)]
            near += [row_error(got[1:], want[layer][:-1])] if len(ids) > 1 else []
    errors = torch.cat(found)
    rounding = torch.cat(own) if own else torch.zeros_like(errors)
    bounds = (FLOAT32,) if exact else BOUNDS
    tolerance = next((bound for bound in bounds if int((rounding > bound).sum()) * 10 < len(errors)), bounds[-1])
    far, own_far = int((errors > tolerance).sum()), int((rounding > tolerance).sum())
    said: dict[str, Any] = {
        "rows": len(errors), "worst": float(errors.max()), "median": float(errors.median()), "tolerance": tolerance,
        "far": far, "own_far": own_far, "nearest_neighbour": min(near),
        "where": f"first in {places[int((errors > tolerance).nonzero()[0])]}" if far else "",
    }  # fmt: skip
    if min(near) <= tolerance:
        return {**said, "state": "undecided", "note": f"the check cannot tell neighbours apart: {min(near):.2f}"}
    if own_far * 10 >= len(errors):
        text = f"rounding hides it: {own_far} of {len(errors)} rows of Transformers' own in {architecture.dtype} are off by more than {tolerance}"
        return {**said, "state": "undecided", "note": text}
    if not far:
        return {**said, "state": "right", "note": f"{len(errors)} rows, worst {said['worst']:.1e}"}
    if not exact:  # rounding alone chooses other experts in some rows; in how many?
        for number in range(len(prompts)):  # a sequence that is wrong as a whole may be short
            mine = torch.tensor([place.endswith(f"sequence {number}") for place in places])
            ours, theirs = (float((values[mine] > tolerance).float().mean()) for values in (errors, rounding))
            if ours > 0.5 and theirs < 0.25:
                text = f"{ours:.0%} of the rows of sequence {number} are off by more than {tolerance}, {theirs:.0%} of Transformers' own"
                return {**said, "state": "undecided", "note": text}
        text = f"{far} of {len(errors)} rows are off by more than {tolerance}, {own_far} of Transformers' own in {architecture.dtype}"
        return {**said, "state": "right" if far <= 2 * own_far else "wrong", "note": text}
    return {**said, **second_opinion(path, prompts, results, reference)}


#: A fresh interpreter in which nothing of this library is loaded.
VLLM = """
import json, os, sys
from vllm import LLM, SamplingParams

def main():
    path, dtype, prompts, top, out, step, share = json.load(sys.stdin)
    llm = LLM(
        path, dtype=dtype, enforce_eager=True, max_model_len=256, max_logprobs=top, trust_remote_code=True,
        max_num_batched_tokens=step, enable_chunked_prefill=True, enable_prefix_caching=False, max_num_seqs=32,
        gpu_memory_utilization=share, kv_cache_memory_bytes=1 << 30,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert not any(name.startswith("spec_vllm_compat.seams") for name in sys.modules)
    rows = [[{k: v.logprob for k, v in (row or {}).items()} for row in o.prompt_logprobs] for o in outputs]
    with open(out, "w") as file:
        json.dump(rows, file)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)

if __name__ == "__main__":
    main()
"""


def second_opinion(path: Path, prompts: list[list[int]], results: list[Any], reference: Any) -> dict[str, Any]:
    """Which of the two is off: the captured rows, or vLLM itself? In float32; its own log-probabilities decide."""
    import torch

    out = path / "logprobs.json"
    done = subprocess.run(
        [sys.executable, "-c", VLLM],
        input=json.dumps([str(path), "float32", prompts, TOP, str(out), STEP, share()]),
        env={**os.environ, "VLLM_PLUGINS": ""}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    if done.returncode:
        error = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return {"state": "undecided", "note": f"rows differ, and vLLM alone gives no log-probabilities: {error}"[:600]}
    judged = json.loads(out.read_text())

    def difference(logits_of: Callable[[int], torch.Tensor]) -> float:
        worst = 0.0
        for index, said in enumerate(judged):
            with torch.no_grad():
                logprobs = torch.log_softmax(logits_of(index).float(), dim=-1)
            for found, expected in zip(logprobs[:-1], said[1:], strict=True):
                worst = max([worst, *(abs(float(found[int(token)]) - value) for token, value in expected.items())])
        return worst

    rows = difference(lambda index: reference.head(results[index]["hidden_states"][-1]))
    shifted = difference(lambda index: reference.head(results[index]["hidden_states"][-1].roll(1, dims=0)))
    transformers = difference(lambda index: reference.logits(prompts[index]))
    numbers = {"rows_nats": rows, "transformers_nats": transformers}
    text = (
        f"vLLM's own log-probabilities differ from those of the captured last layer by {rows:.1e} nats, "
        f"from Transformers' by {transformers:.1e}"
    )
    if not math.isfinite(rows) or rows > NATS or shifted < 100 * NATS:
        return {**numbers, "state": "wrong", "note": text}
    return {**numbers, "state": "right by vLLM", "note": text}


if __name__ == "__main__":
    sys.exit(main())
