"""The table of architectures: what is not proven right is never shown as right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import architectures
import render_architectures

RIGHT = {
    "name": "llama", "architecture": "LlamaForCausalLM", "vllm": "0.16.0", "speculators": "0.3.0", "device": "cpu",
    "state": "right", "rows": 12, "worst": 2e-6, "tolerance": 1e-4, "dtype": "float32", "note": "",
    "container": "model.layers", "output": "hidden + residual",
}  # fmt: skip


def rendered(monkeypatch: pytest.MonkeyPatch, folder: Path, *found: dict[str, Any]) -> str:
    monkeypatch.setattr(render_architectures, "RESULTS", folder)
    for index, result in enumerate(found):
        (folder / f"{index}.json").write_text(json.dumps(result))
    return render_architectures.page()


def row(page: str, title: str) -> str:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
    return line


def test_a_right_cell_has_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = rendered(monkeypatch, tmp_path, RIGHT)
    assert row(page, "LlamaForCausalLM") == (
        "| LlamaForCausalLM | model.layers | hidden + residual | right, 2e-06 float32 |"
    )


def test_a_cell_names_the_settings_that_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = rendered(monkeypatch, tmp_path, {**RIGHT, "environment": {"VLLM_MLA_DISABLE": "1"}})
    assert row(page, "LlamaForCausalLM").endswith("| right, 2e-06 float32, `VLLM_MLA_DISABLE=1` |")


def test_a_cell_names_the_newer_model_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = rendered(monkeypatch, tmp_path, {**RIGHT, "model_runner": "V2"})
    assert row(page, "LlamaForCausalLM").endswith("| right, 2e-06 float32, model runner V2 |")


@pytest.mark.parametrize("state", ["refused", "not run", "undecided", "wrong"])
def test_other_states_are_not_called_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str) -> None:
    bad = {**RIGHT, "name": "qwen2", "state": state, "note": "the reason"}
    page = rendered(monkeypatch, tmp_path, RIGHT, bad)
    assert "right" not in row(page, "Qwen2ForCausalLM")
    assert state in row(page, "Qwen2ForCausalLM").lower()
    assert f"1. Qwen2ForCausalLM, {state}: the reason" in page


def test_a_cell_without_a_result_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = rendered(monkeypatch, tmp_path, RIGHT, {**RIGHT, "vllm": "0.32.0", "name": "qwen2"})
    assert row(page, "LlamaForCausalLM").endswith("| right, 2e-06 float32 | not run |")
    assert row(page, "Qwen3ForCausalLM") == "| Qwen3ForCausalLM |  |  | not run | not run |"


@pytest.mark.parametrize(
    "change",
    [
        {"worst": 2e-4},
        {"rows": 0},
        {"worst": float("nan")},
        {"worst": 1.0, "far": 1, "own_far": 1},
        {"worst": 1.0, "dtype": "bfloat16", "far": 3, "own_far": 1},
        {"worst": 1.0, "dtype": "bfloat16", "far": 12, "own_far": 6},
    ],
)
def test_a_result_that_contradicts_itself_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="is called right"):
        rendered(monkeypatch, tmp_path, {**RIGHT, **change})


def test_a_crash_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import sys; print('why', file=sys.stderr); sys.exit(3)")
    monkeypatch.setattr(architectures, "__file__", str(script))
    found = architectures.supervise("llama", 60)
    assert (found["state"], found["note"]) == ("not run", "exit status 3 / why")


def test_the_page_is_that_of_the_results() -> None:
    assert render_architectures.PAGE.read_text(encoding="utf-8") == render_architectures.page()
