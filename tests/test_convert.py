"""``convert``: nothing is lost on the way to the newer format and back, and the newer speculators reads what is there.

The environments of this project hold speculators 0.3 or 0.4, so the reader itself is asked only where a newer one is
installed (``nox -s reader``); everywhere else the files are held against the format that is written down here.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
safetensors = pytest.importorskip("safetensors.torch")

from spec_vllm_compat.cli import convert, main, store  # noqa: E402

LAYERS = [2, 5, 7, 9]  # speculators' default for 10 blocks
WIDTH = 6


def reader() -> Any:
    """The data set class of speculators 0.5 and newer, or None."""
    try:
        return importlib.import_module("speculators.train.data").ArrowDataset
    except (ImportError, AttributeError):
        return None


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, args)])
    return int(ended.value.code or 0)


def make(
    root: Path, numbers: list[int], *, shard_size: int = 4, dtype: Any = torch.bfloat16, beside: bool = True
) -> Path:
    torch.manual_seed(7)
    for number in numbers:
        tokens = 3 + number % 5
        sample = {
            "input_ids": torch.randint(0, 500, (tokens,)),
            "hidden_states": [torch.randn(tokens, WIDTH).to(dtype) for _ in LAYERS],
            "loss_mask": torch.randint(0, 2, (tokens,)),
        }
        store.write_sample(store.sample_path(root, shard_size, number), sample)
    if beside:
        config = {"hidden_states": {"layer_ids": LAYERS}, "data": {"num_samples": len(numbers)}, "model": {"x": "ä"}}
        store.write_json(root / "data_config.json", config)
        store.write_json(root / "manifest.json", {"status": "complete"})
    return root


def contents(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.suffix == ".pt":
            sample = torch.load(path, weights_only=True)
            states = [(str(rows.dtype), rows.tolist()) for rows in sample["hidden_states"]]
            found[name] = sample["input_ids"].tolist(), sample["loss_mask"].tolist(), states
        elif path.suffix == ".json" and path.name not in (convert.RECORD, "sample_lengths.json"):
            found[name] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("shard_size", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_there_and_back_nothing_is_lost(tmp_path: Path, shard_size: int, dtype: Any) -> None:
    old = make(tmp_path / "old", [0, 1, 2, 5, 6, 10], shard_size=shard_size, dtype=dtype)
    before = contents(old)
    assert run(old, tmp_path / "new") == 0
    assert run(tmp_path / "new", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == before == contents(old)
    lengths = json.loads((tmp_path / "back" / "sample_lengths.json").read_text())
    assert lengths == {str(n): 3 + n % 5 for n in (0, 1, 2, 5, 6, 10)}
    folders = {path.parent for path in (tmp_path / "back").rglob("data_*.pt")}
    assert all((folder / "sample_lengths.json").exists() for folder in folders)


def test_the_new_format_is_the_stated_one(tmp_path: Path, capsys: Any) -> None:
    numbers = [0, 1, 2, 3, 4, 7, 12]
    old = make(tmp_path / "old", numbers)
    assert run(old, tmp_path / "new") == 0
    data = datasets.load_from_disk(str(tmp_path / "new"))
    assert data.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert len(data) == len(numbers)
    files = sorted(path.name for path in (tmp_path / "new" / "hidden_states").iterdir())
    assert files == sorted(f"hs_{index}.safetensors" for index in range(len(numbers)))
    for index, number in enumerate(numbers):
        sample = torch.load(store.sample_path(old, 4, number), weights_only=True)
        row = data[index]
        assert row["input_ids"].equal(sample["input_ids"])  # tensors: the format travels with the data set
        assert row["loss_mask"].equal(sample["loss_mask"])
        assert row["seq_len"] == len(sample["input_ids"])
        loaded = safetensors.load_file(tmp_path / "new" / "hidden_states" / f"hs_{index}.safetensors")
        assert set(loaded) == {"token_ids", "hidden_states"}
        assert loaded["token_ids"].dtype == torch.int64
        assert loaded["token_ids"].equal(sample["input_ids"])
        assert loaded["hidden_states"].shape == (len(sample["input_ids"]), len(LAYERS), WIDTH)
        for layer, rows in enumerate(sample["hidden_states"]):
            assert loaded["hidden_states"][:, layer].equal(rows)
            assert loaded["hidden_states"].dtype == rows.dtype
    record = json.loads((tmp_path / "new" / convert.RECORD).read_text())
    assert record["layer_ids"] == LAYERS
    assert record["target_layer_ids"] == [3, 6, 8, 10]
    assert "--target-layer-ids 3 6 8, and a model of 10 blocks" in capsys.readouterr().out


@pytest.mark.skipif(reader() is None, reason="speculators 0.5 or newer is not installed")
def test_the_newer_reader_reads_it(tmp_path: Path) -> None:
    numbers = [0, 1, 2, 3, 4, 7, 12, 13, 14, 15]
    old = make(tmp_path / "old", numbers)
    assert run(old, tmp_path / "new") == 0
    dataset = reader()
    arguments: dict[str, Any] = {"max_len": 64, "datapath": str(tmp_path / "new"), "on_missing": "raise"}
    if "train_ratio" in inspect.signature(dataset).parameters:
        arguments["train_ratio"] = 1.0
    else:  # 0.5.0 sets its offset only when there is a split
        arguments["split_ratio"] = 0.999
    read = dataset(**arguments)
    assert len(read) >= len(numbers) - 1
    assert read.approx_lengths == [3 + number % 5 for number in numbers][: len(read)]
    for index in range(len(read)):
        sample = torch.load(store.sample_path(old, 4, numbers[index]), weights_only=True)
        item = read[index]
        assert item is not None
        assert item["input_ids"].equal(sample["input_ids"])
        assert item["loss_mask"].equal(sample["loss_mask"])
        assert item["hidden_states"].float().equal(torch.cat(sample["hidden_states"][:-1], dim=-1).float())
        assert item["verifier_last_hidden_states"].float().equal(sample["hidden_states"][-1].float())


@pytest.mark.skipif(reader() is None, reason="speculators 0.5 or newer is not installed")
def test_the_newer_reader_notices_other_tokens(tmp_path: Path) -> None:
    """That the test above can fail: rows under another number are refused by the reader."""
    assert run(make(tmp_path / "old", list(range(8))), tmp_path / "new") == 0
    states = tmp_path / "new" / "hidden_states"
    (states / "hs_0.safetensors").replace(states / "hs_1.safetensors")
    (states / "hs_2.safetensors").replace(states / "hs_0.safetensors")
    name = "train_ratio" if "train_ratio" in inspect.signature(reader()).parameters else "split_ratio"
    read = reader()(max_len=64, datapath=str(tmp_path / "new"), on_missing="raise", **{name: 0.999})
    with pytest.warns(UserWarning, match="token ids"):
        found = read[0]
    assert not isinstance(found, dict)


def newer(root: Path, rows: int = 4, extracted: tuple[int, ...] = (0, 1, 3)) -> Path:
    """What speculators 0.5 and newer leaves: every row of the data set, and hidden states of some."""
    torch.manual_seed(3)
    ids = [torch.randint(0, 500, (4 + row,)) for row in range(rows)]
    table = {"input_ids": [row.tolist() for row in ids], "loss_mask": [[0, *[1] * (len(row) - 1)] for row in ids]}
    datasets.Dataset.from_dict({**table, "seq_len": [len(row) for row in ids]}).save_to_disk(str(root))
    (root / "hidden_states").mkdir()
    for row in extracted:
        tensors = {"token_ids": ids[row], "hidden_states": torch.randn(len(ids[row]), 4, WIDTH)}
        safetensors.save_file(tensors, root / "hidden_states" / f"hs_{row}.safetensors")
    return root


def test_back_from_what_newer_speculators_wrote(tmp_path: Path, capsys: Any) -> None:
    new = newer(tmp_path / "new")
    assert run(new, tmp_path / "old") == 1
    assert "--layer-ids" in capsys.readouterr().err
    assert run(new, tmp_path / "old", "--layer-ids", 2, 5, 7, 10) == 0
    assert json.loads((tmp_path / "old" / convert.RECORD).read_text())["layer_ids"] == [1, 4, 6, 9]
    assert sorted(path.name for path in (tmp_path / "old").glob("*.pt")) == ["data_0.pt", "data_1.pt", "data_3.pt"]
    problems, sample = store.check_sample(tmp_path / "old" / "data_3.pt", layers=4, hidden_size=WIDTH, values=True)
    assert not problems
    assert sample is not None
    rows = safetensors.load_file(new / "hidden_states" / "hs_3.safetensors")["hidden_states"]
    assert torch.stack(sample["hidden_states"], 1).equal(rows)
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_hidden_states_of_other_tokens_are_refused(tmp_path: Path, capsys: Any) -> None:
    new = newer(tmp_path / "new")
    states = new / "hidden_states"
    (states / "hs_0.safetensors").replace(states / "hs_1.safetensors")
    assert run(new, tmp_path / "old", "--layer-ids", 2, 5, 7, 10) == 1
    assert "hs_1.safetensors: expected hidden_states [4, 4, hidden_size]" in capsys.readouterr().err
    assert not (tmp_path / "old").exists()
    assert not (tmp_path / "old.part").exists()


def test_a_record_cannot_write_elsewhere(tmp_path: Path, capsys: Any) -> None:
    assert run(make(tmp_path / "old", [0, 1]), tmp_path / "new") == 0
    record = json.loads((tmp_path / "new" / convert.RECORD).read_text())
    for spoilt in ({"files": ["../data_0.pt", "data_1.pt"]}, {"beside": {"../x.json": 1}}):
        (tmp_path / "new" / convert.RECORD).write_text(json.dumps(record | spoilt))
        assert run(tmp_path / "new", tmp_path / "back") == 1
        assert "expected names of samples and JSON files; found '../" in capsys.readouterr().err


def truncate(root: Path) -> None:
    path = root / "rows_0-4" / "data_2.pt"
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_layer(root: Path) -> None:
    path = root / "rows_0-4" / "data_2.pt"
    sample = torch.load(path, weights_only=True)
    torch.save({**sample, "hidden_states": sample["hidden_states"][:3]}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "cannot be read"),
        (drop_a_layer, "3 layers, 4 asked for"),
        (lambda root: (root / "token_freq.pt").write_bytes(b""), "no other .pt; found"),
        (lambda root: (root / "data_1.pt").write_bytes(b""), "one data_N.pt a sample"),
        (lambda root: (root / "data_config.json").unlink(), "Pass --layer-ids"),
        (lambda root: (root / "data_config.json").write_text('{"hidden_states": {"layer_ids": [1]}}'), "It says [1]"),
    ],
)
def test_nothing_starts_on_unsound_data(tmp_path: Path, capsys: Any, spoil: Any, message: str) -> None:
    old = make(tmp_path / "old", list(range(6)))
    spoil(old)
    assert run(old, tmp_path / "new") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.part").exists()


def test_rows_that_are_not_finite_stop_it(tmp_path: Path, capsys: Any) -> None:
    old = make(tmp_path / "old", list(range(3)))
    path = old / "rows_0-4" / "data_1.pt"
    sample = torch.load(path, weights_only=True)
    sample["hidden_states"][0][1, 1] = float("nan")
    torch.save(sample, path)
    assert run(old, tmp_path / "new") == 1
    assert "data_1.pt: tensor 0, row 1 holds NaN" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_existing_target_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    old = make(tmp_path / "old", [0])
    (tmp_path / "new").mkdir()
    for target in (tmp_path / "new", old / "new", old):
        assert run(old, target) == 1
        assert "expected a folder that is not there yet" in capsys.readouterr().err


def test_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    old, other = make(tmp_path / "old", list(range(6))), make(tmp_path / "other", list(range(5)))
    publish, written = store.publish, []

    def dies(path: Path, write: Any) -> int:
        if len(written) == 3:
            path.with_name(f".{path.name}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        return publish(path, write)

    monkeypatch.setattr(store, "publish", dies)
    assert run(old, tmp_path / "new") == 130
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(store, "publish", lambda path, write: written.append(path) or publish(path, write))
    assert run(other, tmp_path / "new") == 1
    assert "found another one" in capsys.readouterr().err
    assert run(old, tmp_path / "new") == 0
    assert len(written) == len(set(written)) == 6
    assert run(tmp_path / "new", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(old)
    left = [path.name for path in (tmp_path / "new").rglob("*") if path.name.endswith(".part")]
    assert not left


def test_holes_and_a_last_layer_that_is_not_the_highest_are_said(tmp_path: Path, capsys: Any) -> None:
    old = make(tmp_path / "old", [0, 1, 3, 4, 7], beside=False)
    assert run(old, tmp_path / "new", "--layer-ids", 9, 2, 5, 7) == 0
    said = capsys.readouterr()
    assert "has 5 samples and no number 2 (3 missing)" in said.err
    assert "the last layer is not the highest" in said.err
    assert "--target-layer-ids" not in said.out
    assert run(make(tmp_path / "whole", [0, 1]), tmp_path / "other") == 0
    said = capsys.readouterr()
    assert "warning" not in said.err
    assert "--target-layer-ids" in said.out
