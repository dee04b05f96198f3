"""`verify` on directories as unpatched speculators leaves them, and on damage of other kinds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import standin
from spec_vllm_compat.cli.faults import string_order, string_order_by_lengths
from spec_vllm_compat.cli.verify import Verification

LAYER_IDS = [1, 3, 5]
Samples = list[tuple[list[int], list[int]]]


@pytest.fixture
def samples() -> Samples:
    rng = random.Random(5)
    made = []
    for _ in range(40):
        ids = [rng.randrange(3, 512) for _ in range(rng.randrange(5, 60))]
        made.append((ids, [rng.randrange(2) for _ in ids]))
    return made


@pytest.fixture
def prepared(samples: Samples, tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in samples))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    """Files as speculators' own script writes them: flat, with its data_config.json."""

    def write(results: list[dict[str, Any]], layer_ids: list[int] = LAYER_IDS) -> Path:
        out = tmp_path / "out"
        out.mkdir()
        for number, result in enumerate(results):
            torch.save(result, out / f"data_{number}.pt")
        config = {
            "hidden_states": {"layer_ids": layer_ids},
            "data": {"num_samples": len(results)},
            "model": {"target_model_path": "model"},
        }
        (out / "data_config.json").write_text(json.dumps(config))
        return out

    return write


def sample(ids: list[int], mask: list[int], layer_ids: list[int] = LAYER_IDS) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor(ids),
        "hidden_states": [standin.rows(ids, layer) for layer in layer_ids],
        "loss_mask": torch.tensor(mask),
    }


def check(out: Path, prepared: Path | None = None) -> Verification:
    verification = Verification(out)
    verification.run(values=True)
    if prepared is not None:
        verification.against_data(prepared, None, None)
    return verification


def in_string_order(samples: Samples, batch: int) -> list[dict[str, Any]]:
    """What speculators 0.4 leaves: results in string order of request ids, masks paired by place and cut to fit."""
    results = []
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        for place, source in enumerate(sorted(range(len(part)), key=str)):
            ids = part[source][0]
            results.append(sample(ids, part[place][1][: len(ids)]))
    return results


def after_chunk_loss(samples: Samples, batch: int, budget: int) -> list[dict[str, Any]]:
    """What speculators 0.3 leaves: the rest of a prompt that a step cuts is lost, later rows move up."""
    results = []
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        kept: list[list[torch.Tensor]] = [[] for _ in LAYER_IDS]
        room = budget
        for ids, _ in part:
            ran = min(len(ids), room)
            room = budget if ran < len(ids) else room - ran
            for index, layer in enumerate(LAYER_IDS):
                kept[index].append(standin.rows(ids, layer)[:ran])
        layers = [torch.cat(rows) for rows in kept]
        offset = 0
        for ids, mask in part:
            states = [rows[offset : offset + len(ids)].clone() for rows in layers]
            results.append({**sample(ids, mask), "hidden_states": states})
            offset += len(ids)
    return results


def test_right_data_of_speculators_alone(samples, directory, prepared):
    verification = check(directory([sample(*one) for one in samples]), prepared)
    assert not verification.problems
    assert "no manifest: not written by spec-vllm-compat" in verification.text()
    assert "tokens and masks are those of" in verification.text()


@pytest.mark.parametrize("batch", [11, 16, 40])
def test_string_order(samples, directory, prepared, batch):
    out = directory(in_string_order(samples, batch))
    alone = check(out)
    assert "fault: string order" in alone.problems
    assert f"each batch of {batch} " in alone.problems["fault: string order"].text
    assert f"batches of {batch} " in check(out, prepared).problems["fault: string order"].text


def test_string_order_of_equal_lengths_needs_the_data(samples, directory, tmp_path):
    equal = [(ids * 12, [number % 2] * 60) for number, (ids, _) in enumerate((ids[:5], mask) for ids, mask in samples)]
    path = tmp_path / "equal.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in equal))
    out = directory(in_string_order(equal, 20))
    assert not check(out).problems
    found = check(out, path).problems
    assert "in batches of 20" in found["fault: string order"].text
    assert "data_2 holds line 11" in found["fault: string order"].where


def test_ten_sequences_a_call_are_in_order(samples, directory):
    assert not check(directory(in_string_order(samples, 10))).problems


def test_chunk_loss(samples, directory):
    found = check(directory(after_chunk_loss(samples, 10, 200))).problems
    assert "fault: chunk loss" in found
    assert "fault: string order" not in found
    assert found["rows"].where


def test_layers_dropped(samples, directory):
    found = check(directory([sample(*one, layer_ids=[1, 3]) for one in samples], layer_ids=[3, 1, 3])).problems
    assert {"layers", "fault: layers dropped"} <= set(found)


def _tear(out: Path) -> None:
    path = out / "data_7.pt"
    path.write_bytes(path.read_bytes()[:-500])


def _change(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = out / "data_7.pt"
    loaded = torch.load(path)
    change(loaded)
    torch.save(loaded, path)


DAMAGE = [
    pytest.param(_tear, "unreadable", id="torn"),
    pytest.param(lambda out: (out / "data_7.pt").write_bytes(b""), "unreadable", id="empty"),
    pytest.param(lambda out: (out / "data_7.pt").unlink(), "holes", id="hole"),
    pytest.param(lambda out: _change(out, lambda s: s["hidden_states"][1][2].fill_(float("nan"))), "finite", id="nan"),
    pytest.param(lambda out: _change(out, lambda s: s["hidden_states"][1][2].zero_()), "zero", id="zeros"),
    pytest.param(lambda out: _change(out, lambda s: s.update(loss_mask=None)), "format", id="no mask"),
    pytest.param(lambda out: _change(out, lambda s: s["hidden_states"].pop()), "layers", id="layer missing"),
    pytest.param(
        lambda out: _change(out, lambda s: s.update(hidden_states=[rows.float() for rows in s["hidden_states"]])),
        "mixed",
        id="dtype",
    ),
    pytest.param(lambda out: torch.save({}, out / "token_freq.pt"), "stray", id="stray"),
    pytest.param(lambda out: torch.save({}, out / "data_40.pt"), "extra", id="extra"),
    pytest.param(lambda out: (out / "data_config.json").unlink(), "config", id="no config"),
]


@pytest.mark.parametrize(("damage", "kind"), DAMAGE)
def test_damage_is_seen(samples, directory, damage, kind):
    out = directory([sample(*one) for one in samples])
    assert not check(out).problems
    damage(out)
    verification = check(out)
    assert kind in verification.problems
    assert f"WRONG {kind}" in verification.text()
    assert not any(name.startswith("fault") for name in verification.problems)


def test_a_sample_that_is_there_twice(samples, directory):
    out = directory([sample(*one) for one in samples])
    (out / "rows_0-10").mkdir()
    (out / "rows_0-10/data_7.pt").write_bytes((out / "data_7.pt").read_bytes())
    assert "twice" in check(out).problems


def test_wrong_masks_are_seen_with_the_data(samples, directory, prepared):
    out = directory([sample(*one) for one in samples])
    _change(out, lambda s: s["loss_mask"].neg_().add_(1))
    assert not check(out).problems
    assert check(out, prepared).problems["mask"].where == ["data_7: loss_mask is not that of the prepared data"]


def test_string_order_is_that_of_strings():
    assert [string_order(12, 12, place) for place in range(12)] == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert string_order_by_lengths([(number, 5, 5) for number in range(30)]) is None


def test_one_is_not_many(samples, directory):
    out = directory([sample([5], [1])])
    assert check(out).text().startswith(f"{out}: 1 of 1 sample, 1 token, ")
    (out / "data_0.pt").unlink()
    assert "WRONG holes: no sample is there: no file below DIR is called data_N.pt" in check(out).text()
    assert check(out).text().endswith("1 kind of problem")


def test_what_convert_wrote_is_named(tmp_path, capsys):
    from spec_vllm_compat.cli import main

    (tmp_path / "hidden_states").mkdir()
    (tmp_path / "hidden_states/hs_0.safetensors").touch()
    with pytest.raises(SystemExit) as done:
        main(["verify", str(tmp_path)])
    assert done.value.code == 1
    said = capsys.readouterr().err
    assert "found 1 file hidden_states/hs_I.safetensors, the format of speculators 0.5 and newer" in said


def test_exit_status_and_json(samples, directory, capsys):
    from spec_vllm_compat.cli import main

    out = directory([sample(*one) for one in samples])
    with pytest.raises(SystemExit) as done:
        main(["verify", str(out), "--json"])
    assert done.value.code == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 40
    (out / "data_3.pt").unlink()
    with pytest.raises(SystemExit) as done:
        main(["verify", str(out)])
    assert done.value.code == 1
