"""`extract` without a model: numbering, resuming, failing, being killed. The model is a stand-in (standin.py)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import standin
from spec_vllm_compat import CompatError
from spec_vllm_compat.cli import extract as module
from spec_vllm_compat.cli import plan
from spec_vllm_compat.cli.samples import Sample
from spec_vllm_compat.cli.verify import Verification

LAYER_IDS = (4, 0, 5)
Options = SimpleNamespace


@pytest.fixture(autouse=True)
def _no_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.Plan, "data_config", standin.data_config)


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def make(count: int = 30, *extra: str, seed: int = 1) -> Path:
        rng = random.Random(seed)
        path = tmp_path / f"data-{count}-{seed}.jsonl"
        with path.open("w") as file:
            for number in range(count):
                ids = [rng.randrange(3, standin.VOCABULARY) for _ in range(rng.randrange(2, 60))]
                row: dict[str, Any] = {"input_ids": ids}
                if number % 3:
                    row["loss_mask"] = [rng.randrange(2) for _ in ids]
                file.write(json.dumps(row) + "\n")
            for line in extra:
                file.write(line + "\n")
        return path

    return make


@pytest.fixture
def options(tmp_path: Path, data: Callable[..., Path]) -> Callable[..., Options]:
    def make(**changed: Any) -> Options:
        values = {
            "model_path": str(standin.model(tmp_path / "model")),
            "prepared_data": changed.pop("prepared_data", None) or data(),
            "output_dir": tmp_path / "out",
            "layer_ids": LAYER_IDS,
            "batch_size": 4,
            "shard_size": 10,
        }
        needed = ["--model-path", "m", "--prepared-data", "d", "--output-dir", "o"]
        return Options(**{**module.command.make_context("extract", needed).params, **values, **changed})

    return make


def run(options: Options, **how: Any) -> tuple[int, list[standin.Generator]]:
    made: list[standin.Generator] = []

    def build(**kwargs: Any) -> standin.Generator:
        made.append(standin.Generator(kwargs["layer_ids"], **how))
        return made[-1]

    return module.extract(options, build), made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("data_*.pt"))}


def assert_right(options: Options) -> None:
    """Every sample is that of its line, whatever the batches were."""
    lines = [json.loads(line) for line in options.prepared_data.read_text().splitlines()]
    paths = {int(path.stem.split("_")[1]): path for path in options.output_dir.rglob("data_*.pt")}
    assert sorted(paths) == list(range(len(lines)))
    for number, row in enumerate(lines):
        sample = torch.load(paths[number], weights_only=True)
        ids = row["input_ids"]
        assert sample["input_ids"].tolist() == ids
        assert sample["loss_mask"].tolist() == row.get("loss_mask", [1] * len(ids))
        for layer, states in zip(LAYER_IDS, sample["hidden_states"], strict=True):
            assert torch.equal(states, standin.rows(ids, layer))
    check = Verification(options.output_dir)
    check.run(values=True)
    check.against_data(options.prepared_data, None, None)
    assert not check.problems


def test_samples_are_those_of_their_lines(options):
    status, _ = run(options())
    assert status == 0
    assert_right(options())
    out = options().output_dir
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["rows_0-10", "rows_10-20", "rows_20-30"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["identity"]["layer_ids"] == list(LAYER_IDS)
    for folder in (out, out / "rows_10-20"):  # the trainer looks beside whatever sample it happens to list first
        lengths = json.loads((folder / "sample_lengths.json").read_text())
        assert lengths["17"] == len(torch.load(out / "rows_10-20" / "data_17.pt")["input_ids"])


def test_flat(options):
    assert run(options(shard_size=0))[0] == 0
    assert_right(options())
    assert not [path for path in options().output_dir.iterdir() if path.is_dir()]


def test_batches_hold_like_lengths_and_every_sample_once():
    rng = random.Random(0)
    samples = [Sample(n, n + 1, [0] * rng.randrange(1, 90), b"") for n in range(95)]
    made = list(plan.batches(samples, 8, 40))
    assert sorted(sample.number for batch in made for sample in batch) == list(range(95))
    lengths = [len(sample.input_ids) for batch in made for sample in batch if sample.number < 40]
    assert lengths == sorted(lengths, reverse=True)
    assert [sample.number // 40 for batch in made for sample in batch] == [0] * 40 + [1] * 40 + [2] * 15


def test_bad_lines_are_named_before_the_model_loads(options, data):
    wrong = [
        "{not json",
        "[1, 2]",
        '{"input_ids": []}',
        '{"input_ids": [5, 512]}',
        '{"input_ids": [5, "6"]}',
        '{"input_ids": [5, 6], "loss_mask": [1]}',
        '{"input_ids": [5, 6], "loss_mask": [1, 7]}',
        '{"text": "no tokens"}',
    ]
    path = data(3, *wrong)
    never_built: list[Any] = []
    with pytest.raises(CompatError) as caught:
        module.extract(options(prepared_data=path), never_built.append)
    text = str(caught.value)
    assert "lines that are no samples (8):" in text
    for line in range(4, 12):
        assert f"line {line}: " in text
    assert "token id 512 is outside the model's vocabulary [0, 512)" in text
    assert not options(prepared_data=path).output_dir.exists()


def test_skipped_lines_keep_their_numbers(options, data):
    path = data(4, "{", '{"input_ids": [7, 8, 9]}')
    assert run(options(prepared_data=path, skip_bad_lines=True))[0] == 0
    numbers = sorted(int(path.stem.split("_")[1]) for path in options().output_dir.rglob("data_*.pt"))
    assert numbers == [0, 1, 2, 3, 5]
    check = Verification(options().output_dir)
    check.run(values=True)
    assert not check.problems


def test_parquet_and_datasets_on_disk_give_the_same(options, data, tmp_path):
    datasets = pytest.importorskip("datasets")
    path = data(12)
    run(options(prepared_data=path, output_dir=tmp_path / "lines"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    table = datasets.Dataset.from_list([{"loss_mask": None, **row} for row in rows])
    table.to_parquet(str(tmp_path / "data.parquet"))
    table.save_to_disk(str(tmp_path / "folder"))
    for source in ("data.parquet", "folder"):
        run(options(prepared_data=tmp_path / source, output_dir=tmp_path / f"from-{source}"))
        assert contents(tmp_path / f"from-{source}") == contents(tmp_path / "lines")


def test_token_frequencies(options, data, tmp_path):
    path = data(5)
    run(options(prepared_data=path, token_freq_path=tmp_path / "freq/token_freq.pt"))
    wanted: dict[int, int] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        for token, counts in zip(row["input_ids"], row.get("loss_mask", [1] * 99), strict=False):
            if counts:
                wanted[token] = wanted.get(token, 0) + 1
    assert torch.load(tmp_path / "freq/token_freq.pt", weights_only=True) == wanted
    with pytest.raises(CompatError, match="takes every"):
        run(options(prepared_data=path, token_freq_path=options().output_dir / "token_freq.pt"))


def test_conversations_and_tokens_do_not_mix(options, data):
    talk = '{"messages": [{"role": "user", "content": "hello"}]}'
    with pytest.raises(CompatError, match="line 4 is a conversation, other lines are tokens"):
        run(options(prepared_data=data(3, talk)))


def test_resume_fills_holes_and_replaces_what_is_damaged(options):
    run(options())
    out = options().output_dir
    before = contents(out)
    (out / "rows_0-10/data_3.pt").unlink()
    torn = out / "rows_10-20/data_15.pt"
    torn.write_bytes(torn.read_bytes()[:-700])
    other = out / "rows_20-30/data_22.pt"
    shutil.copy(out / "rows_20-30/data_23.pt", other)
    (out / "rows_0-10/.data_4.pt.part").write_bytes(b"left by a kill")
    status, (generator,) = run(options())
    assert status == 0
    assert len(generator.calls) == 3  # whole batches are run, three samples are written
    assert json.loads((out / "manifest.json").read_text())["runs"][-1]["ok"] == 3
    assert contents(out) == before
    assert not list(out.rglob("*.part"))
    assert run(options())[1] == []  # nothing to do: no model is loaded


def test_more_data_later(options, data):
    first = data(12)
    run(options(prepared_data=first))
    more = first.with_name("more.jsonl")
    more.write_text(first.read_text() + '{"input_ids": [9, 8, 7]}\n')
    status, (generator,) = run(options(prepared_data=more))
    assert (status, len(generator.calls)) == (0, 1)
    assert [9, 8, 7] in generator.calls[0]
    assert_right(options(prepared_data=more))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"resume": False}, "--no-resume wants an empty directory"),
        ({"layer_ids": (4, 5)}, "another layer_ids"),
        ({"max_seq_len": 9}, "another max_seq_len"),
        ({"save_dtype": "float32"}, "another save_dtype"),
        ({"layer_ids": (6,)}, "layer 6 does not exist"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_there_is_not_mixed_with_something_else(options, changed, message):
    run(options())
    before = contents(options().output_dir)
    with pytest.raises(CompatError, match=message):
        run(options(**changed))
    assert contents(options().output_dir) == before


def test_other_data_are_refused(options, data):
    run(options())
    before = contents(options().output_dir)
    with pytest.raises(CompatError, match="made from other data"):
        run(options(prepared_data=data(30, seed=2)))
    assert contents(options().output_dir) == before


def test_a_folder_that_convert_has_made_is_left_alone(options):
    out = options().output_dir
    out.mkdir()
    (out / "conversion.json").write_text("{}")
    with pytest.raises(CompatError, match="was written by convert"):
        run(options())
    assert contents(out) == {}


def test_samples_of_somebody_else_are_not_gone_on_with(options):
    out = options().output_dir
    out.mkdir()
    torch.save({}, out / "data_0.pt")
    with pytest.raises(CompatError, match="no manifest: something else wrote them"):
        run(options())


def test_the_disk_is_looked_at_first(options, monkeypatch):
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(CompatError, match=r"expected .* of free disk; found 1\.00kB"):
        run(options())


def test_one_bad_sample_does_not_take_others_with_it(options, data, capsys):
    path = data(11, '{"input_ids": [5, 511, 5]}')
    lines = path.read_text().replace("511,", "510,").splitlines()[:-1]
    path.write_text("\n".join([*lines, '{"input_ids": [5, 511, 5]}']))
    status, _ = run(options(prepared_data=path), poison=511)
    assert status == 1
    assert "line 12 (data_11) failed: RuntimeError: poison" in capsys.readouterr().err
    manifest = json.loads((options().output_dir / "manifest.json").read_text())
    assert (manifest["status"], [failed["line"] for failed in manifest["failed"]]) == ("with failures", [12])
    assert len(contents(options().output_dir)) == 11
    assert run(options(prepared_data=path))[0] == 0  # the same command tries it again
    assert_right(options(prepared_data=path))


def test_failures_in_a_row_stop_the_job(options, data):
    path = data(1, *['{"input_ids": [5, 511, 5]}'] * 20)
    status, (generator,) = run(options(prepared_data=path), poison=511)
    assert status == 1
    assert sum(call == [[5, 511, 5]] for call in generator.calls) == 5
    manifest = json.loads((options().output_dir / "manifest.json").read_text())
    assert "5 samples failed in a row" in manifest["runs"][-1]["why"]


@pytest.mark.parametrize("how", [{"max_failures": 1}, {"fail_on_error": True}])
def test_the_first_failure_can_stop_the_job(options, data, how):
    path = data(1, *['{"input_ids": [5, 511, 5]}'] * 20)
    status, (generator,) = run(options(prepared_data=path, **how), poison=511)
    assert (status, sum(call == [[5, 511, 5]] for call in generator.calls)) == (1, 1)
    manifest = json.loads((options().output_dir / "manifest.json").read_text())
    assert (manifest["status"], manifest["runs"][-1]["why"]) == (
        "stopped",
        "1 sample failed in a row: RuntimeError: poison",
    )


def test_values_that_the_dtype_cannot_hold(options, data, monkeypatch):
    monkeypatch.setattr(standin, "rows", lambda ids, _layer: torch.full((len(ids), standin.HIDDEN), 1e5))
    status, _ = run(options(prepared_data=data(2), save_dtype="float16"))
    assert status == 1
    assert "choose another --save-dtype" in (options().output_dir / "manifest.json").read_text()


def test_ctrl_c_finishes_the_batch(options):
    status, (generator,) = run(options(), interrupt_at=3)
    assert status == 1
    assert len(generator.calls) == 3
    assert len(contents(options().output_dir)) == sum(map(len, generator.calls))
    manifest = json.loads((options().output_dir / "manifest.json").read_text())
    assert (manifest["status"], manifest["runs"][-1]["ok"]) == ("stopped", 10)
    assert run(options())[0] == 0
    assert_right(options())


def command(options: Options, delay: float, *more: str) -> list[str]:
    return [
        sys.executable, str(Path(standin.__file__)), str(delay), "extract", "--model-path", options.model_path,
        "--prepared-data", str(options.prepared_data), "--output-dir", str(options.output_dir),
        "--layer-ids", *map(str, LAYER_IDS), "--batch-size", "2", "--shard-size", "10", *more,
    ]  # fmt: skip


def start(*arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_samples(out: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(list(out.rglob("data_*.pt"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_at_random_moments_and_resumed(options, data, tmp_path):
    wanted = options(prepared_data=data(80))
    whole = options(prepared_data=data(80), output_dir=tmp_path / "whole", batch_size=2)
    run(whole)
    rng = random.Random(7)
    kills = 0
    for target in (5, 20, 45, 60):
        job = start(wanted, 0.03)
        wait_for_samples(wanted.output_dir, target)
        time.sleep(rng.random() * 0.1)
        job.kill()
        kills += job.wait() == -signal.SIGKILL
        job.stdout.close()
    assert kills == 4
    half = Verification(wanted.output_dir)
    half.run(values=True)
    assert set(half.problems) == {"holes"}  # nothing torn
    last = start(wanted, 0)
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output
    assert_right(wanted)
    assert contents(wanted.output_dir) == contents(whole.output_dir)


def test_one_job_a_shard(options):
    from spec_vllm_compat.cli.store import locked

    out = options().output_dir
    out.mkdir()
    with locked(out / ".manifest.lock"), pytest.raises(CompatError, match="another extract is writing this part"):
        run(options())
    assert run(options())[0] == 0


def test_two_shards_at_once_one_killed_and_resumed(options, data):
    wanted = options(prepared_data=data(60))
    first, second = (start(wanted, 0.2, "--num-shards", "2", "--shard-index", index) for index in "01")
    wait_for_samples(wanted.output_dir / "rows_30-40", 3)
    second.kill()
    assert first.wait(300) == 0
    second.wait()
    check = Verification(wanted.output_dir)
    check.run(values=True)
    assert set(check.problems) == {"holes"}
    again = start(wanted, 0, "--num-shards", "2", "--shard-index", "1")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    for job in (first, second):
        job.stdout.close()
    assert_right(wanted)


def test_the_trainer_takes_no_other_file_for_a_sample(options):
    run(options())
    taken = [path for path in options().output_dir.rglob("*") if path.name.endswith("pt")]
    assert sorted(taken) == sorted(options().output_dir.rglob("data_*.pt"))


def test_arguments(tmp_path, monkeypatch):
    from spec_vllm_compat.cli import main

    seen: list[Options] = []
    monkeypatch.setattr(module, "extract", lambda options: seen.append(options) or 0)
    words = [
        "extract",
        "--model-path",
        "m",
        "--layer-ids",
        "2",
        "30",
        "58",
        "60",
        "--prepared-data",
        "d",
        "--output-dir",
        "o",
    ]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert (done.value.code, seen[0].layer_ids) == (0, (2, 30, 58, 60))
    with pytest.raises(SystemExit) as done:
        main([*words, "--shard-index", "1"])
    assert done.value.code == 2
    os.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["verify", "nowhere"])
    assert done.value.code == 2
