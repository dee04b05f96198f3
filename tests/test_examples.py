"""Every example as it stands: Python scripts and shell scripts run on small models, the workflow fits what it calls."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT

EXAMPLES = ROOT / "examples"
LAYER_IDS = ["2", "0", "5"]
LONGEST = 64


def run(*command: object, **more: str) -> str:
    """Output of a command that must succeed; this interpreter's own commands come first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **more}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    rng = random.Random(3)
    path = tmp_path / "tokenized.jsonl"
    with path.open("w") as file:
        for length in (5, 40, 80, 3, 17, 30, 64):
            ids = [rng.randrange(3, 512) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids]}) + "\n")
    return path


def lengths(prepared: Path) -> list[int]:
    return [min(len(json.loads(line)["input_ids"]), LONGEST) for line in prepared.read_text().splitlines()]


def rows_agree(directory: Path, model: Path, prepared: Path) -> None:
    """`verify` finds nothing wrong, tokens and masks included, and every row is that of Transformers."""
    command = [sys.executable, "-m", "spec_vllm_compat", "verify", directory, "--prepared-data", prepared]
    out = run(*command, "--model-path", model, "--against", "transformers", "--samples", 7)
    assert f"{len(lengths(prepared))} of {len(lengths(prepared))} samples" in out
    assert f"{3 * sum(lengths(prepared))} rows" in out
    assert "nothing wrong was found" in out


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path) -> None:
    run("bash", "-n", script)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_shim_is_imported_before_speculators(script: Path) -> None:
    lines = script.read_text().splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("import spec_vllm_compat", "from speculators")
    ]
    assert places == sorted(places)


@pytest.mark.stack
def test_minimal(smollm2: Path) -> None:
    out = run(sys.executable, EXAMPLES / "minimal.py", smollm2)
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("layer ")] == [
        f"layer {layer}" for layer in (2, 15, 27, 29)
    ]


@pytest.mark.stack
def test_the_script_of_the_original_pipeline(small_model: Callable[..., Path], prepared: Path, tmp_path: Path) -> None:
    import torch

    model, out = small_model("llama"), tmp_path / "hidden"
    command = [sys.executable, EXAMPLES / "02_extract_hidden_states.py", "--model-path", model, "--prepared-data"]
    command += [prepared, "--output-dir", out, "--batch-size", 3, "--max-seq-len", LONGEST, "--tp-size", 1]
    command += ["--gpu-memory-utilization", 0.3, "--layer-ids", *LAYER_IDS]
    assert "7 of 7 samples to do" in run(*command)
    assert sorted(path.name for path in out.iterdir()) == [f"data_{number}.pt" for number in range(7)]
    for number, length in enumerate(lengths(prepared)):
        sample = torch.load(out / f"data_{number}.pt", weights_only=True)
        line = json.loads(prepared.read_text().splitlines()[number])
        assert sample["input_ids"].tolist() == line["input_ids"][:length]
        assert sample["loss_mask"].tolist() == line["loss_mask"][:length]
        assert [rows.shape[0] for rows in sample["hidden_states"]] == [length] * 3
    config = {"hidden_states": {"layer_ids": [int(k) for k in LAYER_IDS]}, "data": {"num_samples": 7}}
    (out / "data_config.json").write_text(json.dumps({**config, "model": {"target_model_path": str(model)}}))
    rows_agree(out, model, prepared)


def shard(script: str, model: Path, prepared: Path, out: Path, **more: str) -> str:
    options = ["--layer-ids", *LAYER_IDS, "--batch-size", 4, "--max-seq-len", LONGEST, "--gpu-memory-utilization", 0.3]
    return run(EXAMPLES / script, model, prepared, out, *options, **more)


@pytest.mark.stack
def test_slurm_array_of_two(small_model: Callable[..., Path], prepared: Path, tmp_path: Path) -> None:
    model, out = small_model("llama"), tmp_path / "hidden"
    for task in "01":
        shard("slurm_array.sh", model, prepared, out, SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_COUNT="2")
    assert {path.name for path in out.glob("manifest*.json")} == {f"manifest-{task}-of-2.json" for task in "01"}
    rows_agree(out, model, prepared)


@pytest.mark.stack
def test_all_gpus_of_a_host_with_one(small_model: Callable[..., Path], prepared: Path, tmp_path: Path) -> None:
    model, out = small_model("llama"), tmp_path / "hidden"
    assert "nothing wrong was found" in shard("all_gpus.sh", model, prepared, out, GPUS="1")
    rows_agree(out, model, prepared)


def test_all_gpus_says_which_job_failed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [EXAMPLES / "all_gpus.sh", tmp_path / "no-model", tmp_path / "no-data.jsonl", tmp_path / "hidden"]
    environment = {**os.environ, "PATH": path, "GPUS": "2"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "shard 0 failed" in done.stderr
    assert "shard 1 failed" in done.stderr
    assert "no-model" in done.stderr


def test_the_workflow_fits_the_one_it_calls() -> None:
    yaml = pytest.importorskip("yaml")
    called = yaml.safe_load((ROOT / ".github" / "workflows" / "check-pins.yml").read_text())
    workflow = yaml.safe_load((EXAMPLES / "check-extraction.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["uses"].endswith("/spec_vllm_compat/.github/workflows/check-pins.yml@main")
    inputs = called[True]["workflow_call"]["inputs"]  # YAML reads the key `on` as true
    assert set(job["with"]) <= set(inputs)
    assert {name for name, spec in inputs.items() if spec.get("required")} <= set(job["with"])
