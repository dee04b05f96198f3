"""The sides that benchmarks/throughput.py compares. Each runs in a process of its own and obeys one command at a time.

python benchmarks/sides.py NAME MODEL OPTIONS_JSON REPLIES_FD        commands come as JSON lines on stdin

ours           generate, save and disk through speculators' generate() with spec_vllm_compat; prefill on the same engine
hand           generate with speculators 0.3.0 repaired by hand (benchmarks/unpatched.py), sampling kept
transformers   generate with Transformers' output_hidden_states
vllm           vllm and vllm-files: vLLM's own method `extract_hidden_states`, which hands rows over as files; needs no speculators
vllm-prefill   generate with vLLM's LLM class and one sampled token, no capture: the measure for the side above
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path.insert(0, str(Path(__file__).parent))

#: What the stock script of speculators uses to write samples.
WRITERS = 8


class Point:
    """One size to measure: batches of random token ids, the same for every side."""

    def __init__(self, layers: list[int], sequences: int, length: int, batch: int, vocabulary: int) -> None:
        rng = random.Random(0)
        ids = [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(sequences)]
        self.layers = layers
        self.batches = [ids[i : i + batch] for i in range(0, sequences, batch)]


def processor_seconds() -> float:
    """What this process and everything that it has started have used so far."""
    import psutil

    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def peak_memory(pid: int) -> int:
    """Most resident bytes of a process since :func:`forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    return 0


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def device_peak(_worker: Any) -> int:
    """In the worker: most bytes that tensors took on the device since the last call."""
    import torch

    if not torch.cuda.is_available():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(peak)


def model_runner(worker: Any) -> str:
    """In the worker: which of vLLM's model runners it has."""
    return type(worker.model_runner).__module__


def end_steps_by(_worker: Any, way: str) -> None:
    """In the worker: choose how steps are ended from now on, by dropping the state or by sampling."""
    from spec_vllm_compat.worker import capture

    original = vars(capture).setdefault("_benchmark_original", capture.finish_two_phase)
    capture.finish_two_phase = original if way == "drop" else (lambda worker: worker.sample_tokens(None))


class Engine:
    """speculators' generator, ours or repaired by hand."""

    def __init__(self, model: str, options: dict[str, Any], ours: bool) -> None:
        if ours:
            import spec_vllm_compat  # noqa: F401 - before speculators
        from speculators.data_generation import vllm_hidden_states_generator as module

        self.module, self.ours = module, ours
        if not ours:
            os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
            import torch
            import unpatched

            if torch.cuda.is_available():
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            unpatched.prepare(module, "0.3.0", memory=not torch.cuda.is_available())
        if options["dummy"]:
            load_config = module.LoadConfig
            module.LoadConfig = lambda **_keywords: load_config(load_format="dummy")
        self.generator = module.VllmHiddenStatesGenerator(
            model,
            layer_ids=options["layers"],
            max_model_len=options["max_length"] + 1,
            gpu_memory_utilization=options["utilization"],
            tensor_parallel_size=options["tp"],
        )
        self.layers = options["layers"]
        self.compared = False
        self.pids = [os.getpid(), *(worker.proc.pid for worker in self.generator.executor.workers)]
        self.notes = {"model_runner": self.generator.executor.collective_rpc(model_runner)[0]}

    def run(self, point: Point, side: str, folder: Path | None, idle: int | None) -> dict[str, Any]:
        gen = self.generator
        if point.layers != self.layers:
            gen.layer_ids = self.layers = point.layers
            gen._setup_capture()
        for pid in self.pids:
            forget_peak(pid)
        gen.executor.collective_rpc(device_peak)
        calls: list[float] = []
        attached = set(gen.executor.session._attached) if self.ours else set()
        if self.ours:
            from spec_vllm_compat.driver import buffers

            self.idle_calls = getattr(self, "idle_calls", buffers.IDLE_CALLS)
            buffers.IDLE_CALLS = idle or self.idle_calls
            gen.executor.collective_rpc(end_steps_by, args=("sample" if side == "sample" else "drop",))
        if side == "replies":
            if not self.compared:
                self._compare_ways(point.batches[0])
            self.compared = True
            gen.executor.session.shared = False
        begin = time.perf_counter()
        if side == "prefill":
            for batch in point.batches:
                self._prefill(batch)
                calls.append(time.perf_counter())
        elif side in ("generate", "sample", "replies", "hand"):
            for batch in point.batches:
                gen.generate(batch)
                calls.append(time.perf_counter())
        else:
            assert folder is not None
            begin = self._save(point, folder, calls, side)
        end = time.perf_counter()
        if side == "replies":
            gen.executor.session.shared = True
        numbers = [begin, *calls]
        session = gen.executor.session if self.ours else None
        return {
            "seconds": end - begin,
            "calls": [round(after - before, 5) for before, after in zip(numbers, calls, strict=False)],
            "after_last_call": end - calls[-1],
            "new_buffers": len(session._attached - attached) if session else 0,
            "device_peak_bytes": gen.executor.collective_rpc(device_peak),
            "host_peak_bytes": [peak_memory(pid) for pid in self.pids],
        }

    def _compare_ways(self, batch: list[list[int]]) -> None:
        """Rows in the replies, as where a worker cannot map our memory, must be those of the fast way, bit for bit."""
        import torch

        session = self.generator.executor.session
        lengths = [max(1, len(ids) // (1 + index % 5)) for index, ids in enumerate(batch)]
        batch = [ids[:length] for ids, length in zip(batch, lengths, strict=True)]
        for again in (batch, batch[::-1], [*batch, *batch]):
            session.shared = True
            fast = self.generator.generate(again)
            session.shared = False
            for one, other in zip(fast, self.generator.generate(again), strict=True):
                for rows, others in zip(one["hidden_states"], other["hidden_states"], strict=True):
                    assert torch.equal(rows, others), "rows in replies differ from rows in shared memory"
        session.shared = True

    def _save(self, point: Point, folder: Path, calls: list[float], side: str) -> float:
        """As the stock script does, or as `extract` does; `disk`: the rows of one batch again and again."""
        import torch

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        repeat, durable = side.startswith("disk"), side.endswith("extract")
        write, writers, room = torch.save, WRITERS, 1 << 30
        if durable:
            from spec_vllm_compat.cli.store import write_sample

            write, writers, room = lambda sample, path: write_sample(Path(path), sample), 4, 2 * len(point.batches[0])
        results = self.generator.generate(point.batches[0]) if repeat else []
        begin = time.perf_counter()
        writes: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(writers) as pool:
            for number, batch in enumerate(point.batches):
                results = results if repeat else self.generator.generate(batch)
                for index, sample in enumerate(results):
                    while len(writes) >= room:
                        writes.popleft().result()
                    path = folder / f"data_{number * len(batch) + index}.pt"
                    writes.append(pool.submit(write, sample, str(path)))
                calls.append(time.perf_counter())
        for one in writes:
            one.result()
        return begin

    def _prefill(self, batch: list[list[int]]) -> None:
        """One batch through vLLM's own scheduler and executor, without capture; one token is sampled, as vLLM does."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor
        from vllm.v1.request import RequestStatus

        scheduler, executor = self.generator.scheduler, self.generator.executor
        for ids in batch:
            request = self.module.Request(
                request_id=f"bench-{time.monotonic_ns()}",
                prompt_token_ids=ids,
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
                pooling_params=None,
                eos_token_id=1,
                arrival_time=0.0,
            )
            Scheduler.add_request(scheduler, request)
        while True:
            output = Scheduler.schedule(scheduler)
            MultiprocExecutor.execute_model(executor, output)
            if not output.total_num_scheduled_tokens:
                return
            MultiprocExecutor.sample_tokens(executor, None)
            done = [r.request_id for r in scheduler.requests.values() if r.num_computed_tokens >= r.num_prompt_tokens]
            Scheduler.finish_requests(scheduler, done, RequestStatus.FINISHED_ABORTED)


class Transformers:
    """`output_hidden_states`, the wanted layers brought to the host in the form that generate() returns."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if options["dummy"]:
            with torch.device(self.device):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(self.device)
        self.model = self.model.model.eval()  # no logits: they are of no use here

    def run(self, point: Point, _side: str, _folder: Path | None, _idle: int | None) -> dict[str, Any]:
        import torch

        calls: list[float] = []
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        forget_peak(os.getpid())
        begin = time.perf_counter()
        for batch in point.batches:  # equal lengths, so there is no padding
            with torch.inference_mode():
                states = self.model(
                    torch.tensor(batch, device=self.device), output_hidden_states=True, use_cache=False
                ).hidden_states
            results = [
                {"input_ids": ids, "hidden_states": [states[layer + 1][row].clone().cpu() for layer in point.layers]}
                for row, ids in enumerate(batch)
            ]
            assert len(results) == len(batch)
            calls.append(time.perf_counter())
        return {
            "seconds": calls[-1] - begin,
            "calls": [round(b - a, 5) for a, b in zip([begin, *calls], calls, strict=False)],
            "device_peak_bytes": [torch.cuda.max_memory_allocated() if self.device == "cuda" else 0],
            "host_peak_bytes": [peak_memory(os.getpid())],
        }


class VllmExtract:
    """vLLM's own extraction: rows go through its KV cache to files, one a request, and are loaded from there.

    Side `vllm`: the rows of a batch are loaded before the next batch begins, as generate() hands them out. Side `vllm-files`:
    nothing is loaded, and only at the end the files still being written are waited for.
    """

    def __init__(self, model: str, options: dict[str, Any], capture: bool) -> None:
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the questions to the workers below
        import torch
        from vllm import LLM, SamplingParams

        self.layers = options["layers"]
        self.folder = Path(options["folder"] or "/dev/shm") / f"bench-{os.getpid()}"
        self.llm = LLM(
            model,
            load_format="dummy" if options["dummy"] else "auto",
            dtype=options.get("dtype", "bfloat16"),
            max_model_len=options["max_length"] + 2,
            max_num_batched_tokens=max(8192, options["max_length"] + 2),
            max_num_seqs=32,  # as speculators has it
            gpu_memory_utilization=options["utilization"],
            tensor_parallel_size=options["tp"],
            enforce_eager=True,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,  # the connector takes whole prompts; vLLM 0.22 and 0.23 insist
            **(self._extraction(torch.cuda.is_available()) if capture else {}),
        )
        self.sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self.notes = {"model_runner": self.llm.collective_rpc(model_runner)[0]}

    def _extraction(self, cuda: bool) -> dict[str, Any]:
        import importlib

        import safetensors.torch

        name = "example_hidden_states_connector"
        connector = importlib.import_module(f"vllm.distributed.kv_transfer.kv_connector.v1.{name}")
        # Newer connectors write behind the caller's back, and have a function that waits for a file.
        self.load = getattr(connector, "load_hidden_states", safetensors.torch.load_file)
        self.locks = hasattr(connector, "load_hidden_states")
        ids = [layer + 1 for layer in self.layers]  # vLLM counts inputs of blocks
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector" if cuda else "CpuHiddenStatesConnector",
                "kv_connector_module_path": None if cuda else "cpu_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
            },
        }

    def run(self, point: Point, side: str, _folder: Path | None, _idle: int | None) -> dict[str, Any]:
        import psutil

        if side != "vllm-prefill" and point.layers != self.layers:
            raise ValueError(f"vLLM's own extraction was started for layers {self.layers}, not {point.layers}")
        pids = [os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))]
        for pid in pids:
            forget_peak(pid)
        self.llm.collective_rpc(device_peak)
        calls: list[float] = []
        paths: list[str] = []
        begin = time.perf_counter()
        for batch in point.batches:
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in batch], self.sampling, use_tqdm=False)
            if side != "vllm-prefill":
                paths += [output.kv_transfer_params["hidden_states_path"] for output in outputs]
            if side == "vllm":
                for ids, path in zip(batch, paths[-len(batch) :], strict=True):
                    self._check(self.load(path), ids)
            calls.append(time.perf_counter())
        if side == "vllm-files" and self.locks:
            for path in paths:
                with open(f"{path}.lock") as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH)
        end = time.perf_counter()
        if side == "vllm-files":
            for ids, path in zip(point.batches[-1], paths[-len(point.batches[-1]) :], strict=True):
                self._check(self.load(path), ids)
        written = sum(os.path.getsize(path) for path in paths)
        shutil.rmtree(self.folder, ignore_errors=True)
        return {
            "seconds": end - begin,
            "calls": [round(b - a, 5) for a, b in zip([begin, *calls], calls, strict=False)],
            "after_last_call": end - calls[-1],
            "bytes_written": written,
            "device_peak_bytes": self.llm.collective_rpc(device_peak),
            "host_peak_bytes": [peak_memory(pid) for pid in pids],
        }

    def _check(self, sample: dict[str, Any], ids: list[int]) -> None:
        """Looks at tokens and shape only, so that no row is read: the file is mapped, not copied."""
        rows, tokens = sample["hidden_states"], sample["token_ids"].tolist()
        expected = (len(ids), len(self.layers))
        if tuple(rows.shape[:2]) != expected or tokens != ids:
            raise RuntimeError(f"rows of shape {tuple(rows.shape)}, expected {expected}; tokens equal: {tokens == ids}")


def main() -> None:
    name, model, options, replies = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    with os.fdopen(replies, "w", buffering=1) as out:
        begin = time.perf_counter()
        if name in ("ours", "hand"):
            side: Any = Engine(model, options, ours=name == "ours")
        elif name == "transformers":
            side = Transformers(model, options)
        else:
            side = VllmExtract(model, options, capture=name == "vllm")
        import torch

        versions = {"torch": torch.__version__}
        for package in ("vllm", "transformers", "safetensors"):
            if package in sys.modules:
                versions[package] = sys.modules[package].__version__
        cuda = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if cuda else "CPU"
        hello = {"start_seconds": time.perf_counter() - begin, "versions": versions, "device": device}
        out.write(json.dumps({**hello, **getattr(side, "notes", {})}) + "\n")
        points: dict[str, Point] = {}
        for line in sys.stdin:
            command = json.loads(line)
            key = json.dumps(command["point"])
            if key not in points:
                points = {key: Point(**command["point"])}
            folder = Path(command["folder"]) if command["folder"] else None
            before = processor_seconds()
            reply = side.run(points[key], command["side"], folder, command["idle"])
            reply["processor_seconds"] = processor_seconds() - before
            out.write(json.dumps(reply) + "\n")
    if name in ("ours", "hand"):
        side.generator.executor.shutdown()


if __name__ == "__main__":
    main()
