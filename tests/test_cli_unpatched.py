"""`verify` on what speculators really writes without us: it names the fault of each version (vLLM 0.16 alone)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

#: speculators as benchmarks/unpatched.py starts it, and the writing of its own script.
STOCK = """
import json, random, sys
from pathlib import Path
import torch
from importlib.metadata import version
from speculators.data_generation import vllm_hidden_states_generator as module
import unpatched

def main(model, out):
    old = version("speculators").startswith("0.3")
    rng = random.Random(5)
    lengths = [900] * 10 + [300] * 5 if old else [rng.randrange(4, 90) for _ in range(30)]
    lines = [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]
    rows = [{"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids]} for ids in lines]
    (out / "data.jsonl").write_text("\\n".join(map(json.dumps, rows)))
    unpatched.prepare(module, version("speculators"))
    generator = module.VllmHiddenStatesGenerator(str(model), layer_ids=[1, 3, 4], max_model_len=1024, gpu_memory_utilization=0.3)
    (out / "out").mkdir()
    batch = 15 if old else 14
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        for place, result in enumerate(generator.generate([row["input_ids"] for row in part])):
            ids = result["input_ids"]
            mask = torch.tensor(part[place]["loss_mask"])[: len(ids)]
            states = [rows.contiguous() for rows in result["hidden_states"]]
            torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": mask}, out / f"out/data_{first + place}.pt")
    config = {"hidden_states": {"layer_ids": [1, 3, 4]}, "data": {"num_samples": len(rows)}, "model": {"target_model_path": str(model)}}
    (out / "out" / "data_config.json").write_text(json.dumps(config))
    generator.executor.shutdown()

if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def stock(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not importlib.metadata.version("vllm").startswith("0.16"):
        pytest.skip("benchmarks/unpatched.py knows vLLM 0.16")
    folder = tmp_path_factory.mktemp("stock")
    (folder / "stock.py").write_text(STOCK)
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "stock.py", str(small_model()), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def verify(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, object]], str]:
    command = [sys.executable, "-m", "spec_vllm_compat", "verify", "out", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout)
    asked = subprocess.run([*command, "--json"], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    found = {problem["id"]: problem for problem in json.loads(asked.stdout)["problems"]}
    return done.returncode, found, done.stdout


def test_the_fault_is_named(stock: Path) -> None:
    old = importlib.metadata.version("speculators").startswith("0.3")
    fault, text = ("chunk loss", "808 rows missing") if old else ("string order", "each batch of 14 ")
    status, found, said = verify(stock)
    assert status == 1
    assert f"WRONG fault: {fault}" in said
    assert text in str(found[f"fault: {fault}"]["text"])
    assert not [name for name in found if name.startswith("fault") and name != f"fault: {fault}"]


def test_the_data_say_where_samples_stand(stock: Path) -> None:
    old = importlib.metadata.version("speculators").startswith("0.3")
    _, found, said = verify(stock, "--prepared-data", "data.jsonl")
    if old:  # tokens and masks are right, rows are not
        assert "tokens and masks are those of" in said
    else:
        assert "data_2 holds line 11" in found["fault: string order"]["where"]


def test_numbers_of_samples_before_the_loss_are_wrong_too(stock: Path) -> None:
    if not importlib.metadata.version("speculators").startswith("0.3"):
        pytest.skip("rows of speculators 0.4 fit their tokens")
    _, found, _ = verify(stock, "--against", "transformers", "--samples", "15")
    assert "data_9: " in str(found["numbers"]["where"])  # every shape right, rows of the next samples at its end
