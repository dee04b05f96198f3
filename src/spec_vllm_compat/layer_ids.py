"""What a layer id means: speculators and vLLM number the same states differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEANING = (
    "layer id k of the generator is the output of decoder block k; "
    "k in vLLM's eagle_aux_hidden_state_layer_ids is the input of block k, the output of block k - 1"
)


@dataclass(frozen=True)
class LayerNumbering:
    """The same hidden states in both numberings; ``str()`` gives a table.

    Attributes:
        speculators: ids as ``VllmHiddenStatesGenerator(layer_ids=...)`` takes them. k is the output of decoder block k,
            counted from 0: hidden plus residual, before the final norm; Transformers' ``hidden_states[k + 1]``, but for
            the last block, where that is taken after the norm.
        vllm: the numbers under which vLLM's ``eagle_aux_hidden_state_layer_ids`` serves those states. k is the input of
            block k. The output of the last of n blocks is n here, which is no block's input: vLLM 0.16 accepts the
            number and returns nothing for it.
    """

    speculators: tuple[int, ...]
    vllm: tuple[int, ...]

    def __str__(self) -> str:
        rows = (
            ("output of decoder block", self.speculators),
            ("layer_ids of the generator", self.speculators),
            ("vLLM eagle_aux_hidden_state_layer_ids", self.vllm),
            ("Transformers hidden_states index", self.vllm),
        )
        return "\n".join(f"{name:<38}{''.join(f'{layer:>5}' for layer in ids)}" for name, ids in rows)


def layer_numbering(layer_ids: Sequence[int]) -> LayerNumbering:
    """State both numberings for a choice of layers. Nothing is translated anywhere else.

    A head that was trained on rows of ``layer_ids`` sees the same states in vLLM only if its configuration says
    ``eagle_aux_hidden_state_layer_ids = layer_numbering(layer_ids).vllm``, for the layers that are its input: with
    speculators' four default layers the first three, as the last one is the training target.

    Args:
        layer_ids: ids as given to ``VllmHiddenStatesGenerator``, in any order, each 0 or more.

    Returns:
        The ids in both numberings, in the order given.

    Raises:
        ValueError: an id is no integer or negative.

    Sources: speculators 0.3.0 custom_worker.py and 0.4.0.1 the same (the state is stored after ``layer(...)``); vLLM
    0.16.0 model_executor/models/llama.py ``LlamaModel.forward`` (stored before it).
    """
    for position, layer in enumerate(layer_ids):
        if type(layer) is not int or layer < 0:
            raise ValueError(f"layer_ids[{position}]: expected a decoder block counted from 0; found {layer!r}")
    return LayerNumbering(speculators=tuple(layer_ids), vllm=tuple(layer + 1 for layer in layer_ids))
