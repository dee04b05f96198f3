"""The guard at run time: what no row may be, whatever the model computed."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

pytestmark = pytest.mark.stack
LAYERS = [1, 3, 4]
POISON = 7  # token whose embedding is made NaN or infinite in the worker
VARIABLE = "SPEC_VLLM_COMPAT_NONFINITE"


@pytest.fixture(scope="module")
def generator(build, small_model):
    return build(small_model(), float32=True, layer_ids=LAYERS, max_model_len=512)


def _set_embedding(worker: Any, token: int, value: float | None) -> None:
    weight = worker.model_runner.model.model.embed_tokens.weight.data
    if value is None:
        weight[token] = worker.kept
    else:
        worker.kept = weight[token].clone()
        weight[token, 5] = value


@pytest.fixture(params=[float("nan"), float("inf")], ids=["nan", "inf"])
def poisoned(generator, request):
    generator.executor.collective_rpc(_set_embedding, args=(POISON, request.param))
    yield
    generator.executor.collective_rpc(_set_embedding, args=(POISON, None))


@pytest.fixture
def prompts(batch) -> list[list[int]]:
    clean = [[token if token != POISON else 8 for token in ids] for ids in batch(30, 12, 21)]
    clean[1][4] = POISON
    return clean


@pytest.mark.usefixtures("poisoned")
def test_nan_and_infinite_rows_are_an_error(generator, prompts, small_model, reference, monkeypatch):
    from reference import FLOAT32, assert_rows
    from spec_vllm_compat import ExtractionError

    monkeypatch.delenv(VARIABLE, raising=False)
    said = rf"request req_\d+_1: layer 1, row \d+ holds NaN or infinite values\. .*{VARIABLE}=warn"
    with pytest.raises(ExtractionError, match=said):
        generator.generate(prompts)
    (first, third) = generator.generate([prompts[0], prompts[2]])  # the next call is right
    assert_rows(first, prompts[0], LAYERS, reference(small_model()), FLOAT32)
    assert_rows(third, prompts[2], LAYERS, reference(small_model()), FLOAT32)


@pytest.mark.usefixtures("poisoned")
def test_they_are_returned_with_a_warning_on_request(generator, prompts, small_model, reference, monkeypatch, caplog):
    from reference import FLOAT32, assert_rows

    monkeypatch.setenv(VARIABLE, "warn")
    with caplog.at_level(logging.WARNING, logger="spec_vllm_compat"):
        results = generator.generate(prompts)
    (record,) = [record for record in caplog.records if record.name == "spec_vllm_compat"]
    assert re.match(r"request req_\d+_1: layer 1, row \d+ holds NaN .*; \d+ of 189 rows", record.getMessage())
    for position in (0, 2):
        assert_rows(results[position], prompts[position], LAYERS, reference(small_model()), FLOAT32)
    for layer, rows in zip(LAYERS, results[1]["hidden_states"], strict=True):
        # The poisoned token and all that attend to it; masked attention spreads NaN to rows before it (0 * NaN).
        assert rows.shape == (12, 128), layer
        assert not rows[4:].isfinite().all(dim=-1).any(), layer


@pytest.mark.parametrize("value", ["", "0", "ignore", "WARN"])
def test_another_setting_is_refused_before_any_work(generator, prompts, monkeypatch, value):
    from spec_vllm_compat import CompatError

    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(CompatError, match=f"{VARIABLE}: expected 'error' or 'warn'; found '{value}'"):
        generator.generate(prompts)
    monkeypatch.setenv(VARIABLE, "error")
    assert len(generator.generate(prompts)) == len(prompts)


def test_rows_of_zeros_are_an_error(generator, prompts):
    """Token 1 is padding; its embedding is zero, and a model without biases keeps it so."""
    from spec_vllm_compat import ExtractionError

    with pytest.raises(ExtractionError, match=r"request req_\d+_1: layer 1 is zero in every row"):
        generator.generate([prompts[0], [1]])
    assert len(generator.generate([[*prompts[0][:3], 1]])) == 1


@pytest.mark.parametrize("position", [0, -1], ids=["first row", "last row"])
def test_results_are_compared_with_what_the_worker_saw(generator, prompts, monkeypatch, position):
    from spec_vllm_compat import ExtractionError
    from spec_vllm_compat.driver.call import Call

    check = Call.check

    def damaged(call: Any, results: Any, asked: Any) -> None:
        results[2]["hidden_states"][1][position] *= 1.001
        check(call, results, asked)

    monkeypatch.setattr(Call, "check", damaged)
    with pytest.raises(ExtractionError, match="sequence 2, layer 3: first or last row is not the one"):
        generator.generate(prompts)
