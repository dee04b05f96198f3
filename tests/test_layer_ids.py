"""Layer ids: what speculators and vLLM mean by them, checked with the real packages."""

from __future__ import annotations

from typing import Any

import pytest

from spec_vllm_compat import layer_numbering, report


def test_both_numberings():
    numbering = layer_numbering([2, 16, 29, 31])
    assert numbering.speculators == (2, 16, 29, 31)
    assert numbering.vllm == (3, 17, 30, 32)
    assert str(numbering).splitlines()[1:3] == [
        "layer_ids of the generator                2   16   29   31",
        "vLLM eagle_aux_hidden_state_layer_ids     3   17   30   32",
    ]


@pytest.mark.parametrize("wrong", [[0, -1], [1.0], ["2"], [True]])
def test_ids_that_name_no_block_are_refused(wrong):
    with pytest.raises(ValueError, match=r"layer_ids\[\d\]: expected a decoder block counted from 0; found "):
        layer_numbering(wrong)


def test_the_report_says_what_a_layer_id_means():
    assert "layer id k of the generator is the output of decoder block k" in str(report())
    assert "eagle_aux_hidden_state_layer_ids is the input of block k" in str(report())


# --- the real packages ------------------------------------------------------------------------------------------------


def _defaults_of_vllm(worker: Any) -> tuple[int, ...]:
    return tuple(worker.model_runner.model.get_eagle3_aux_hidden_state_layers())


def _serve_aux(worker: Any, layers: tuple[int, ...]) -> None:
    """Let vLLM's own model collect its EAGLE-3 states beside our capture."""
    model = worker.model_runner.model
    model.set_aux_hidden_state_layers(layers)
    worker.aux_seen = []

    def split(_module: Any, _args: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return output
        hidden, aux = output
        worker.aux_seen = [rows.clone() for rows in aux]
        return hidden  # the model runner is not set up for an EAGLE-3 head

    worker.aux_hook = model.register_forward_hook(split)


def _aux_seen(worker: Any) -> list[Any]:
    worker.aux_hook.remove()
    worker.model_runner.model.set_aux_hidden_state_layers(())
    return [rows.float().numpy() for rows in worker.aux_seen]


@pytest.mark.stack
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllm_serves_default_heads_one_block_early(build, small_model, batch, family):
    """Data of the default layers, and the states that vLLM's defaults hand to the head: equal numbers, other blocks."""
    import torch

    from reference import row_error

    generator = build(small_model(family, layers=10), float32=True)
    assert generator.layer_ids == [2, 5, 7, 9]
    (served,) = generator.executor.collective_rpc(_defaults_of_vllm)
    assert served == (2, 5, 7)  # the numbers of speculators' first three, which are the head's input
    prompts = batch(41)

    def both(aux_layers: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        generator.executor.collective_rpc(_serve_aux, args=(aux_layers,))
        (result,) = generator.generate(prompts)
        (aux,) = generator.executor.collective_rpc(_aux_seen)
        return result["hidden_states"], [torch.from_numpy(rows) for rows in aux]

    trained_on, seen_in_vllm = both(served)
    assert len(seen_in_vllm) == 3
    for rows, aux in zip(trained_on, seen_in_vllm, strict=False):
        assert row_error(aux, rows) > 0.1, "vLLM serves the states of the training data after all"

    # Numbers translated: what vLLM serves is what was captured, to the bit.
    trained_on, seen_in_vllm = both(layer_numbering(generator.layer_ids[:3]).vllm)
    for rows, aux in zip(trained_on, seen_in_vllm, strict=False):
        assert torch.equal(aux, rows)

    # And what vLLM's defaults serve is the block before.
    generator.layer_ids = [layer - 1 for layer in served]
    generator._setup_capture()
    block_before, seen_in_vllm = both(served)
    for rows, aux in zip(block_before, seen_in_vllm, strict=True):
        assert torch.equal(aux, rows)


@pytest.mark.stack
def test_a_default_head_names_no_layers_so_vllm_takes_its_own():
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from vllm.transformers_utils.configs.speculators.algos import update_eagle3

    assert Eagle3SpeculatorConfig().eagle_aux_hidden_state_layer_ids is None
    for ids, expected in ((None, None), ([3, 6, 8], [3, 6, 8])):
        config: dict[str, Any] = {}
        update_eagle3({"draft_vocab_size": 8, "eagle_aux_hidden_state_layer_ids": ids}, config)
        assert config.get("eagle_aux_hidden_state_layer_ids") == expected  # passed on as it is: nothing is added


@pytest.mark.stack
def test_speculators_trains_on_all_layers_but_the_last():
    import torch
    from speculators.train.data import standardize_data_v1

    rows = [torch.full((3, 2), float(layer)) for layer in (2, 5, 7, 9)]
    data = standardize_data_v1({"hidden_states": rows, "input_ids": torch.arange(3), "loss_mask": torch.ones(3)})
    assert data["hidden_states"][0].tolist() == [2, 2, 5, 5, 7, 7]
    assert data["verifier_last_hidden_states"][0].tolist() == [9, 9]
