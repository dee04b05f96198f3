"""Tokens a second of every way to extract, side by side: the sides take turns, round by round, each in its own process.

    python benchmarks/throughput.py OUT.json --sides prefill generate hand transformers     (make bench: the usual choice)

Sides:
    prefill            the same engine without capture: vLLM's own execute_model and sample_tokens; ratios are to this one
    generate           speculators' generate() with spec_vllm_compat; results of a batch are dropped before the next one
    replies            the same, but rows travel in the replies, as from another host; compared with the fast way first
    save=DIR           generate, every sample written to DIR by eight threads with torch.save, as the stock script does
    save=DIR,IDLE      the same, buffers given back after IDLE calls without use instead of what the library has chosen
    extract=DIR        the same as the command `extract` writes: four threads, each file synchronised with the disk
    disk=DIR, disk-extract=DIR   the writing alone, of rows that are there already: what the file system takes by itself
    hand               speculators 0.3.0 repaired by hand, sampling kept
    transformers       Transformers with output_hidden_states
    sample             generate, but every step ended by sampling; only in the sweep `short`
    vllm=PYTHON,DIR    vLLM's extract_hidden_states, files in DIR (/dev/shm), in the environment of another interpreter (this
                       one); the rows of a batch are loaded before the next batch begins
    vllm-files=PYTHON,DIR   the same, nothing is loaded; the time ends when the last file is written
    vllm-prefill=PYTHON     vLLM's LLM class without capture there; the ratios of vllm and vllm-files are to this one

A model is a checkpoint (--model) or a configuration with weights made up by vLLM (--shape, changed by --hidden and
--depth). --sweep NAME=A,B,C measures --sweep-sides over numbers of captured layers, tokens a batch, calls, or short
sequences (32 a batch).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}


def checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    """A configuration and a tokenizer; the weights are made up."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    shape = dict(SHAPES[options.shape])
    if options.depth:
        shape["num_hidden_layers"] = options.depth
    if options.hidden:  # only the rows matter then: everything else is kept small
        heads = options.hidden // 64
        shape.update(hidden_size=options.hidden, intermediate_size=2 * options.hidden, vocab_size=4096)
        shape.update(num_attention_heads=heads, num_key_value_heads=heads)
    LlamaConfig(
        **shape, max_position_embeddings=8192, architectures=["LlamaForCausalLM"], dtype="bfloat16"
    ).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b", unk_token="a").save_pretrained(folder)
    return folder


class Process:
    """A running benchmarks/sides.py."""

    def __init__(self, name: str, python: str, model: Path, options: dict[str, Any]) -> None:
        self.name = name
        read, write = os.pipe()
        command = [python, str(Path(__file__).with_name("sides.py")), name, str(model), json.dumps(options), str(write)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[write],
            text=True,
            env=_environment(name, python),
        )
        os.close(write)
        self._replies = os.fdopen(read)

    def reply(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.reply()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _environment(name: str, python: str) -> dict[str, str]:
    variables = dict(os.environ)
    if name.startswith("vllm"):
        if python != sys.executable:  # its own environment: nothing of ours, no packages of this one
            variables.pop("PYTHONPATH", None)
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():  # on CPU, vLLM warns that its own extraction is slow without
            variables["LD_PRELOAD"] = str(openmp)
    return variables


class Side:
    """One column of the result."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kind, _, self.argument = text.partition("=")
        self.own = self.kind.startswith("vllm")
        self.process = {"vllm-files": "vllm"}.get(self.kind, self.kind)
        if self.process not in ("hand", "transformers", "vllm", "vllm-prefill"):
            self.process = "ours"
        python, _, self.folder = self.argument.partition(",") if self.own else ("", "", "")
        self.python = python or sys.executable
        self.writes = bool(self.argument) or self.kind in ("vllm", "vllm-files")
        #: Sides with the same key share a process.
        self.key = (self.process, self.python, self.folder)

    def label(self, versions: dict[str, str]) -> str:
        if not self.own:
            return self.text
        name = {
            "vllm": "extract_hidden_states",
            "vllm-files": "extract_hidden_states, files only",
            "vllm-prefill": "LLM.generate",
        }[self.kind]
        return f"{name}, vLLM {versions['vllm']}{f', {self.folder}' if self.folder else ''}"


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "all": [float(f"{value:.5g}") for value in values],
    }


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


class Comparison:
    """Sides that take turns, at one size after the other."""

    def __init__(self, options: argparse.Namespace, model: Path, vocabulary: int) -> None:
        self.options, self.vocabulary = options, vocabulary
        self.deadline = time.monotonic() + options.budget
        self.sides = [Side(text) for text in options.sides]
        engine = {
            "layers": options.layers,
            "max_length": max([options.length, *(int(v) for name, v in options.sweep_values if name == "tokens")]),
            "utilization": options.utilization,
            "tp": options.tp,
            "dummy": options.model is None,
        }
        self.failed: dict[str, str] = {}
        self.processes: dict[tuple[str, str, str], Process] = {}
        self.hello: dict[tuple[str, str, str], dict[str, Any]] = {}
        for key in dict.fromkeys(side.key for side in self.sides):
            self.processes[key] = Process(key[0], key[1], model, {**engine, "folder": key[2]})
            if not options.together:
                self._greet(key)
        for key in self.processes:
            self._greet(key)

    def _greet(self, key: tuple[str, str, str]) -> None:
        if key not in self.hello:
            try:
                self.hello[key] = self.processes[key].reply()
            except RuntimeError as error:
                if key[0] == "ours":
                    raise
                self.hello[key] = {"versions": {"vllm": f"in {key[1]}"}, "failed": str(error)}
            print(key[0], self.hello[key], flush=True)

    def label(self, side: Side) -> str:
        return side.label(self.hello[side.key]["versions"])

    def measure(self, sides: list[Side], rounds: int, **size: Any) -> dict[str, Any]:
        """Every side ``rounds`` times, after one round that warms up; fewer when the time is up."""
        replies: dict[str, list[dict[str, Any]]] = {self.label(side): [] for side in sides}
        tokens: dict[str, int] = {}
        for number in range(rounds + 1):
            if time.monotonic() > self.deadline:
                break
            for side in sides:
                own = {**self._size(), **size}
                if side.kind in self.options.fewer:
                    own["sequences"] = min(own["sequences"], self.options.fewer[side.kind])
                if not number and not side.writes:  # what writes files needs its memory and its files once
                    own["sequences"] = min(own["sequences"], 2 * own["batch"])
                folder, _, idle = side.argument.partition(",") if side.process == "ours" else ("", "", "")
                label = self.label(side)
                if label in self.failed:
                    continue
                try:
                    reply = self.processes[side.key].ask(
                        side=side.kind, point=own, folder=folder or None, idle=int(idle) if idle else None
                    )
                except (
                    RuntimeError,
                    BrokenPipeError,
                ) as error:  # the other sides still run; the report says what failed
                    self.failed[label] = f"{size or 'first size'}, round {number}: {error}"
                    print(label, self.failed[label], flush=True)
                    continue
                tokens[label] = own["sequences"] * own["length"]
                if number:
                    replies[label].append(reply)
                rate = tokens[label] / reply["seconds"]
                print(
                    f"{size or ''} round {number} {label}: {rate:,.0f} tokens/s",
                    reply.get("after_last_call", ""),
                    flush=True,
                )
        rates = {label: [tokens[label] / one["seconds"] for one in all_] for label, all_ in replies.items() if all_}
        result: dict[str, Any] = {}
        for label, values in rates.items():
            version = re.search(r"vLLM [^,]+", label)
            base = rates.get(f"LLM.generate, {version[0]}" if version else "prefill")
            result[label] = {"tokens": tokens[label], "tokens_per_second": spread(values)}
            if base and label != "prefill" and not label.startswith("LLM"):
                result[label]["ratio_to_prefill"] = spread(
                    [one / other for one, other in zip(values, base, strict=False)]
                )
            # On a machine that does other things too, processor time says more than the time that passes.
            used = [tokens[label] / one["processor_seconds"] for one in replies[label]]
            result[label]["tokens_per_processor_second"] = spread(used)
            result[label]["rounds"] = replies[label]
        return result

    def _size(self) -> dict[str, Any]:
        options = self.options
        names = ("layers", "sequences", "length", "batch")
        return {**{name: getattr(options, name) for name in names}, "vocabulary": self.vocabulary}

    def sweep(self, name: str, values: list[int], rounds: int) -> list[dict[str, Any]]:
        wanted = {*self.options.sweep_sides, *(["sample", "hand"] if name == "short" else [])}
        sides = [side for side in self.sides if side.kind in wanted and (side.own or not side.argument)]
        if name == "layers":  # vLLM's own extraction cannot change them once it has started
            sides = [side for side in sides if side.process != "vllm"]
        points = []
        for value in values:
            if time.monotonic() > self.deadline:
                break
            size: dict[str, Any] = {"sequences": self.options.sweep_sequences}
            if name == "layers":
                depth = self.options.total_layers
                size["layers"] = sorted({(index * depth) // value for index in range(value)})
            elif name == "tokens":  # of a batch, which is one call
                size.update(length=value // self.options.batch)
            elif name == "calls":
                size.update(sequences=value * self.options.batch, length=min(self.options.length, 256))
            else:
                size.update(length=value, batch=32, sequences=max(64, 8 * self.options.sweep_sequences))
            points.append({name: value, "size": size, "sides": self.measure(sides, rounds, **size)})
        return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sides", nargs="+", default=["prefill", "generate"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16, 29, 31])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--utilization", type=float, default=0.8)
    parser.add_argument("--fewer", nargs="*", default=[], help="SIDE=SEQUENCES, for sides that are slow")
    parser.add_argument("--sweep", nargs="*", default=[], help="layers=1,4 tokens=512,4096 calls=4,16")
    parser.add_argument("--sweep-sides", nargs="+", default=["prefill", "generate"])
    parser.add_argument("--sweep-sequences", type=int)
    parser.add_argument("--sweep-rounds", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="start all processes at once")
    parser.add_argument("--budget", type=float, default=86400, help="seconds after which no further round begins")
    options = parser.parse_args()
    options.fewer = {name: int(value) for name, value in (text.split("=") for text in options.fewer)}
    options.sweep_sequences = options.sweep_sequences or options.sequences
    sweeps = [
        (name, [int(v) for v in values.split(",")]) for name, values in (text.split("=") for text in options.sweep)
    ]
    options.sweep_values = [(name, value // options.batch) for name, values in sweeps for value in values]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or checkpoint(options, Path(folder))
        config = json.loads((model / "config.json").read_text())
        options.total_layers = config["num_hidden_layers"]
        comparison = Comparison(options, model, config["vocab_size"])
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        report: dict[str, Any] = {
            "machine": machine(),
            "model": {"name": model.name if options.model else "random weights", **{name: config[name] for name in names}},
            "options": {name: value for name, value in vars(options).items() if name not in ("out", "model", "sweep_values")},
            "bytes_a_token": config["hidden_size"] * 2 * len(options.layers),
            "processes": {f"{name}{'' if python == sys.executable else ' ' + hello['versions']['vllm']}": hello
                          for (name, python, _), hello in comparison.hello.items()},
        }  # fmt: skip
        if options.rounds:
            report["sides"] = comparison.measure(
                [side for side in comparison.sides if side.kind != "sample"], options.rounds
            )
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        report["sweeps"] = {}
        for name, values in sweeps:
            report["sweeps"][name] = comparison.sweep(name, values, options.sweep_rounds)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        for process in comparison.processes.values():
            process.end()
    report["failed"] = comparison.failed
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for label, side in report.get("sides", {}).items():
        rate, ratio = side["tokens_per_second"], side.get("ratio_to_prefill")
        tail = f"  {ratio['median']:.3f} of prefill ({ratio['lowest']:.3f} to {ratio['highest']:.3f})" if ratio else ""
        print(
            f"{label:<45} {rate['median']:>10,.0f} tokens/s{tail}; "
            f"{side['tokens_per_processor_second']['median']:,.0f} tokens a processor second"
        )


if __name__ == "__main__":
    main()
