"""The command line on the real stack: a killed job ends like an unbroken one, and the trainer reads what it wrote."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
COMMAND = [sys.executable, "-m", "spec_vllm_compat"]
KILLS = int(os.environ.get("SPEC_VLLM_COMPAT_KILLS", "1"))
SAMPLES = 120
LAYER_IDS = [4, 0, 5]

SCRIPT = """
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator


def main():
    generator = VllmHiddenStatesGenerator({model!r}, layer_ids=[4, 0], max_model_len=64, gpu_memory_utilization=0.3)
    (result,) = generator.generate([[5, 6, 7]])
    print("rows", [tuple(rows.shape) for rows in result["hidden_states"]])


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    rng = random.Random(3)
    path = tmp_path / "tokenized.jsonl"
    with path.open("w") as file:
        for _ in range(SAMPLES):
            ids = [rng.randrange(3, 512) for _ in range(rng.randrange(2, 200))]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids]}) + "\n")
    return path


_jobs: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test() -> Iterator[None]:
    yield
    while _jobs:
        job = _jobs.pop()
        job.kill()
        job.wait()


def extract(model: Path, prepared: Path, out: Path) -> subprocess.Popen[str]:
    words = [
        "extract", "--model-path", model, "--prepared-data", prepared, "--output-dir", out, "--layer-ids", *LAYER_IDS,
        "--batch-size", 4, "--max-seq-len", 256, "--gpu-memory-utilization", 0.3, "--shard-size", 50,
    ]  # fmt: skip
    with (out.parent / f"{out.name}.log").open("a") as log:
        _jobs.append(subprocess.Popen([*COMMAND, *map(str, words)], stdout=log, stderr=log, text=True))
    return _jobs[-1]


def finished(job: subprocess.Popen[str], out: Path) -> None:
    assert job.wait(timeout=900) == 0, (out.parent / f"{out.name}.log").read_text()[-3000:]


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("data_*.pt"))}


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_killed_and_resumed_is_as_never_killed(
    small_model: Callable[..., Path], prepared: Path, tmp_path: Path
) -> None:
    from spec_vllm_compat.cli.verify import Verification

    model, broken, whole = small_model(), tmp_path / "broken", tmp_path / "whole"
    finished(extract(model, prepared, whole), whole)
    rng = random.Random(1)
    workers: list[int] = []
    for kill in range(KILLS):
        job = extract(model, prepared, broken)
        target = rng.randrange(2, SAMPLES // 2) * (kill + 1) // KILLS
        while len(list(broken.rglob("data_*.pt"))) < target:
            assert job.poll() is None, (tmp_path / "broken.log").read_text()[-3000:]
            time.sleep(rng.random() * 0.02)
        workers += children_of(job.pid)
        job.kill()
        assert job.wait() == -signal.SIGKILL
        half = Verification(broken)
        half.run(values=True)
        assert set(half.problems) <= {"holes"}, half.text()
    finished(extract(model, prepared, broken), broken)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "workers outlived their driver"
    assert contents(broken) == contents(whole)

    check = Verification(broken)
    check.run(values=True)
    check.against_data(prepared, str(model), None)
    check.against_transformers(str(model), 6)
    assert not check.problems, check.text()
    assert json.loads((broken / "manifest.json").read_text())["patch_sets"]
    _the_trainer_reads(broken, prepared)
    assert_other_layers_are_seen(broken, model)


def assert_other_layers_are_seen(out: Path, model: Path) -> None:
    """The comparison is worth something: it fails when the layers are claimed to be others."""
    from spec_vllm_compat.cli.verify import Verification

    check = Verification(out)
    check.run(values=False)
    check.layer_ids = [0, 4, 5]
    check.against_transformers(str(model), 2)
    assert "layer 0 holds layer 4" in check.problems["numbers"].where[0]


def _the_trainer_reads(out: Path, prepared: Path) -> None:
    from speculators.train.data import Eagle3SampleFileDataset

    lines = [json.loads(line) for line in prepared.read_text().splitlines()]
    dataset = Eagle3SampleFileDataset(max_len=256, datapath=str(out))
    assert len(dataset) == len(lines)
    by_number = {int(Path(path).stem.split("_")[1]): index for index, path in enumerate(dataset.data)}
    for number in (0, 57, SAMPLES - 1):
        row, item = lines[number], dataset[by_number[number]]
        assert item["input_ids"].tolist() == row["input_ids"][1:]
        assert item["loss_mask"].tolist() == row["loss_mask"][1:]
        assert item["hidden_states"].shape == (len(row["input_ids"]) - 1, 128 * (len(LAYER_IDS) - 1))
    exact = [len(lines[int(Path(path).stem.split("_")[1])]["input_ids"]) for path in dataset.data]
    if "sample_lengths" in Path(sys.modules[Eagle3SampleFileDataset.__module__].__file__ or "").read_text():
        assert dataset.approx_lengths == exact


def test_run_an_unmodified_script(small_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT.format(model=str(small_model())))
    done = subprocess.run(
        [*COMMAND, "run", "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rows [(3, 128), (3, 128)]") == 1


@pytest.mark.parametrize("quantisation", [None, {"quant_method": "no_such_method"}], ids=["plain", "quantised"])
def test_preflight_without_transformers(tmp_path: Path, quantisation: dict[str, str] | None) -> None:
    """An architecture that vLLM alone knows; and a quantisation that it does not."""
    config = {
        "architectures": ["AquilaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 256,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 4000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    if quantisation:
        config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [*COMMAND, "preflight", "config.json", "--layer-ids", "2", "4", "7"],
        cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    print(done.stdout)
    if quantisation:
        assert done.returncode == 1
        assert "compared   with Transformers in float32" in done.stdout
        assert "without its quantisation it works; a small copy with no_such_method: " in done.stdout
    else:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "compared   batches with one sequence at a time" in done.stdout
        assert "compared   with log-probabilities of unpatched vLLM" in done.stdout
