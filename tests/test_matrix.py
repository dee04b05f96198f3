"""The matrix as a product: selection of cells, judgement of results, the generated table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import cell
import columns
import render_matrix

CASES = [{"id": "one", "right": True, "note": "", "error": 1e-6, "strict": True}]


def result(outcome: str = "right", error: str | None = None) -> dict[str, Any]:
    cases = [{**CASES[0], "outcome": outcome, "reason": "why", "note": "broken"}]
    right = int(outcome == "right")
    numbers = {"right": right, "total": 1, "worst_float32": 1e-6, "seconds": 60}
    about = {"vllm": "0.16.0", "speculators": "0.3.0", "torch": "2.10.0", "transformers": "4.57.6", "python": "3.11.7"}
    return {**about, **numbers, "error": error, "cases": cases}


def rendered(monkeypatch: pytest.MonkeyPatch, folder: Path, **cells: dict[str, Any]) -> tuple[str, str]:
    monkeypatch.setattr(render_matrix, "RESULTS", folder)
    for name, content in cells.items():
        path = folder / columns.result_name(name.removeprefix("v").replace("_", "."), "0.3.0")
        path.write_text(json.dumps(content))
    return render_matrix.page(), render_matrix.tested()


def test_cells_are_selected_by_name() -> None:
    names = [
        (column.vllm, speculators) for column, speculators in columns.cells(["0.32.0/0.4.0.1", "0.16.0", "0.16.0"])
    ]
    assert names == [("0.32.0", "0.4.0.1"), ("0.16.0", "0.3.0"), ("0.16.0", "0.4.0"), ("0.16.0", "0.4.0.1")]
    assert len(columns.cells(["all"])) == len(columns.cells(["/"])) == 35 * 3
    assert {speculators for _, speculators in columns.cells(["/0.3.0"])} == {"0.3.0"}


@pytest.mark.parametrize("wanted", ["0.99.0", "0.16.0/0.2.0", "0.33.0"])
def test_what_is_no_cell_is_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match="names no cell"):
        columns.cells([wanted])


def test_a_pull_request_runs_oldest_016_newest_and_another() -> None:
    oldest, middle, newest, another = columns.for_a_pull_request("1")
    assert (oldest, middle, newest) == ("0.11.0/0.3.0", "0.16.0/0.3.0", "0.32.0/0.4.0.1")
    assert len({columns.for_a_pull_request(str(seed))[3] for seed in range(20)}) > 5
    columns.cells([another])


def test_each_vllm_gets_its_torch_and_transformers() -> None:
    by_name = {column.vllm: column for column in columns.COLUMNS}
    assert [by_name[v].torch for v in ("0.11.2", "0.12.0", "0.19.1", "0.26.0", "0.32.0")] == [
        "2.8.0",
        "2.9.1",
        "2.10.0",
        "2.11.0",
        "2.13.0",
    ]
    assert by_name["0.23.0"].transformers.startswith("4.")
    assert by_name["0.24.0"].transformers.startswith("5.")


def test_a_cell_that_was_not_run_is_not_green(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, tested = rendered(monkeypatch, tmp_path, v0_16_0=result())
    (line,) = [line for line in page.splitlines() if line.startswith("| 0.16.0 ")]
    assert line.endswith("| 1 of 1, 1e-06 | not run | not run |")
    assert "| 0.33.0 | 2.14.0 | 5.19.0 |  | not run: no CPU build |" in page
    assert '"0.3.0": ("0.16.0",),' in tested


@pytest.mark.parametrize(
    "bad", [result("wrong"), result("unexpectedly right"), result(error="killed"), {**result(), "cases": []}]
)
def test_a_failed_cell_is_red_and_not_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: dict[str, Any]
) -> None:
    page, tested = rendered(monkeypatch, tmp_path, v0_16_0=result(), v0_17_0=bad)
    assert "**FAILED**" in page
    assert '"0.3.0": ("0.16.0",),' in tested


def test_an_expected_failure_has_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, tested = rendered(monkeypatch, tmp_path, v0_12_0=result("expected failure"))
    assert "0 of 1, 1e-06 (1 expected)" in page
    assert "* vLLM 0.12.0, one: why" in page
    assert '"0.3.0": ("0.12.0",),' in tested


@pytest.mark.parametrize(
    ("vllm", "case", "right", "outcome"),
    [
        ("0.12.0.post2", "qwen3", False, "expected failure"),
        ("0.12.0", "qwen3", True, "unexpectedly right"),
        ("0.14.1", "qwen3", False, "wrong"),
        ("0.12.0", "one-token", False, "wrong"),
        ("0.12.0", "one-token", True, "right"),
        ("0.1.dev1+gabc", "one-token", True, "right"),
    ],
)
def test_expected_failures_hold_for_their_version_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: str, case: str, right: bool, outcome: str
) -> None:
    expected = tmp_path / "expected_failures.json"
    expected.write_text(json.dumps([{"vllm": "==0.12.0", "cases": ["qwen3"], "reason": "why"}]))
    monkeypatch.setattr(cell, "EXPECTED", expected)
    cases: list[dict[str, Any]] = [{"id": case, "right": right}]
    cell.judge_expected(cases, {"vllm": vllm, "speculators": "0.3.0"})
    assert cases[0]["outcome"] == outcome


def test_a_case_that_this_machine_cannot_run_is_neither_right_nor_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, tested = rendered(monkeypatch, tmp_path, v0_16_0=result("impossible here"))
    assert "| 0 of 1, 1e-06; 1 could not run there |" in page
    assert "* vLLM 0.16.0, speculators 0.3.0 (1 cases): why." in page
    assert '"0.3.0": ()' in tested


LOST = "ImportError: version `GLIBC_2.38' not found"
LOST_CXX = "ImportError: /lib/libstdc++.so.6: version `CXXABI_1.3.15' not found (required by vllm/_C.abi3.so)"


@pytest.mark.parametrize(
    ("note", "operators", "outcome"),
    [
        ("worker processes have ended: rank 0 (exit code -4, SIGILL: ...)", "", "impossible here"),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'", LOST, "impossible here"),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'", LOST_CXX, "impossible here"),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'", "", "wrong"),
        ("worker processes have ended: rank 0 (exit code -9, SIGKILL: ...)", LOST, "wrong"),
        ("AssertionError: layer 3, row 7", LOST, "wrong"),
    ],
)
def test_only_what_the_machine_lacks_is_impossible(note: str, operators: str, outcome: str) -> None:
    cases = [{**CASES[0], "right": False, "note": note}]
    about = {"vllm": "0.17.0", "speculators": "0.3.0", "cpu": cell.cpu(), "glibc": "2.36", "operators": operators}
    cell.judge_expected(cases, about)
    assert cases[0]["outcome"] == outcome


def test_a_driver_that_ends_with_an_illegal_instruction_leaves_no_case_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM 0.11's CPU build on a CPU without AVX-512 ends on import."""
    child = tmp_path / "cell.py"
    entry = {"id": "one-token", "right": True, "note": "", "error": 1e-6, "strict": True}
    child.write_text(
        f"import os, signal\nprint({cell.LINE + json.dumps(entry)!r}, flush=True)\nos.kill(os.getpid(), signal.SIGILL)"
    )
    monkeypatch.setattr(cell, "__file__", str(child))
    monkeypatch.setattr(cell, "_wanted", lambda engine: True)
    found = cell.supervise(argparse.Namespace(only=["one-token", "one-sequence"], timeout=60))
    assert [(case["id"], case["outcome"]) for case in found["cases"]] == [
        ("one-token", "right"), ("one-sequence", "impossible here")
    ]  # fmt: skip
    assert (found["error"], found["right"], found["total"]) == (None, 1, 2)
    assert "(SIGILL)" in found["cases"][1]["reason"]
