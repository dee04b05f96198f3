"""Worker processes: however the driver was started, and however it ends."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stack

JOB = """
import spec_vllm_compat
from speculators.data_generation import VllmHiddenStatesGenerator
generator = VllmHiddenStatesGenerator({model!r}, layer_ids=[1, 3], max_model_len=64, gpu_memory_utilization=0.3)
(sample,) = generator.generate([[5, 6, 7]])
print("rows", [tuple(h.shape) for h in sample["hidden_states"]])
"""
GUARDED = "def main():\n{body}\nif __name__ == '__main__':\n    main()\n"
ROWS = "rows [(3, 128), (3, 128)]"


def run(arguments: list[str], cwd: Path, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=stdin,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    left = subprocess.run(["pgrep", "-f", str(cwd)], capture_output=True, text=True, check=False).stdout.split()
    assert not left, f"processes left behind: {left}"
    return done


def assert_ran(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(ROWS) == 1, done.stdout
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "Exception" not in done.stderr, done.stderr[-3000:]


def test_a_script_without_main_guard(small_model, tmp_path):
    (tmp_path / "job.py").write_text(JOB.format(model=str(small_model())))
    assert_ran(run(["job.py"], tmp_path))


def test_a_guarded_script_as_module(small_model, tmp_path):
    body = "\n".join(f"    {line}" for line in JOB.format(model=str(small_model())).splitlines())
    (tmp_path / "job.py").write_text(GUARDED.format(body=body))
    assert_ran(run(["-m", "job"], tmp_path))


def test_a_command_line_with_other_plugins_only(small_model, tmp_path):
    assert_ran(run(["-c", JOB.format(model=str(small_model()))], tmp_path, VLLM_PLUGINS="somebody_elses"))


def test_an_embedded_interpreter(small_model, tmp_path):
    """As in a notebook: no file, code comes in piece by piece."""
    assert_ran(run(["-i", "-q"], tmp_path, stdin=JOB.format(model=str(small_model())) + "\nquit()\n"))


def test_without_us_the_same_script_fails(small_model, tmp_path):
    done = run(["-c", JOB.format(model=str(small_model()))], tmp_path, SPEC_VLLM_COMPAT="off")
    assert done.returncode != 0
    assert done.stderr.count("changes nothing") == 1
    assert "rows" not in done.stdout


def children() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.is_alive()]


def test_del_ends_the_workers(build, small_model, generator_module):
    before = children()
    generator = generator_module.VllmHiddenStatesGenerator(
        str(small_model()), layer_ids=[1], max_model_len=64, gpu_memory_utilization=0.3
    )
    assert len(children()) == len(before) + 1
    del generator
    assert children() == before


def test_an_error_in_the_constructor_ends_the_workers(build, small_model, generator_module, monkeypatch):
    before = children()

    def fails(**_kwargs: Any) -> None:
        assert len(children()) == len(before) + 1
        raise RuntimeError("on purpose")

    monkeypatch.setattr(generator_module, "StructuredOutputManager", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        build(small_model(), layer_ids=[1])
    assert children() == before


def test_a_worker_that_runs_something_else_is_refused(build, small_model, monkeypatch):
    from spec_vllm_compat import WorkerMismatchError
    from spec_vllm_compat.patches import forward_hooks

    before = children()
    monkeypatch.setattr(forward_hooks, "__version__", "99.0")
    with pytest.raises(WorkerMismatchError, match=r"rank 0 runs spec_vllm_compat .*, the driver 99\.0"):
        build(small_model(), layer_ids=[1])
    assert children() == before


def test_the_plugin_is_inert_unless_a_driver_asked(monkeypatch):
    from spec_vllm_compat import plugin, protocol

    monkeypatch.setattr(plugin, "loaded", False)
    monkeypatch.delenv(protocol.WANTED, raising=False)
    plugin.register()
    assert plugin.loaded is False
    monkeypatch.setenv(protocol.WANTED, "1")
    plugin.register()
    assert plugin.loaded is True


def test_two_ranks_give_the_rows_of_one(build, small_model, batch, reference, monkeypatch):
    """float32: the ranks add partial sums in another order, so equality is to rounding, not to the bit."""
    from reference import FLOAT32, assert_rows

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    layers = [3, 0, 5]
    generator = build(small_model(), float32=True, layer_ids=layers, tensor_parallel_size=2, max_model_len=2048)
    prompts = batch(2000, 1900, 5, 2000, 1700, 1900)  # more than one step
    for ids, result in zip(prompts, generator.generate(prompts), strict=True):
        assert_rows(result, ids, layers, reference(small_model()), FLOAT32)
    identities = generator.executor.session.ask(generator.executor, "identify")
    assert [identity.tensor_parallel_rank for identity in identities] == [0, 1]
    assert generator.executor.collective_rpc(_keeps_rows) == [True, False]
    _kill_a_rank_in_the_middle(generator, batch)


def _keeps_rows(worker: Any) -> bool:
    return worker._spec_vllm_compat._buffer is not None


def _generate_for_ever(generator: Any, prompts: list[list[int]]) -> None:
    while True:
        generator.generate(prompts)


def _kill_a_rank_in_the_middle(generator: Any, batch: Any) -> None:
    from spec_vllm_compat import CompatError, ExtractionError

    processes = [handle.proc for handle in generator.executor.workers]
    threading.Timer(0.5, processes[1].kill).start()
    long = batch(*[2000] * 60)
    with pytest.raises(
        ExtractionError,
        match=r"worker processes have ended: .*rank 1 \(exit code -9, SIGKILL: killed from outside.*\), in 'step'",
    ):
        _generate_for_ever(generator, long)
    with pytest.raises(CompatError, match=r"cannot be used any more.*Build a new one"):
        generator.generate(long)
    generator.executor.shutdown()
    assert not [process for process in processes if process.is_alive()]
