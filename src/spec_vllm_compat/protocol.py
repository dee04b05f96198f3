"""What driver and workers say to each other. Importable in both; needs neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Qualified name that goes into ``ParallelConfig.worker_extension_cls``.
EXTENSION = "spec_vllm_compat.worker.extension.HiddenStatesCapture"

#: Set by the driver for its workers; without it the ``vllm.general_plugins`` entry point does nothing.
WANTED = "SPEC_VLLM_COMPAT_WORKER"

#: The worker method through which all requests of this library go.
ASK = "spec_vllm_compat_ask"


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in one step: prompt positions ``start`` to ``start + rows``."""

    request_id: str
    start: int
    rows: int


@dataclass(frozen=True)
class Answer:
    """Reply of one rank. A failure travels as text: vLLM's own way of failing leaves other ranks' replies unread."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Identity:
    """What one worker process runs."""

    rank: int
    tensor_parallel_rank: int
    version: str
    vllm: str
    patch_sets: tuple[str, ...]
    model_runner: str
    plugin: bool


@dataclass(frozen=True)
class Capturing:
    """What a worker captures: name of the module list of decoder layers, and the layer ids in ascending order."""

    container: str
    layer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What one executed scheduler step gave on one rank.

    Attributes:
        chunks: rows by request, in the order of the batch that the model runner ran.
        rows: bytes of the captured rows as a uint8 array ``[layers, tokens, hidden_size * itemsize]``; None on ranks
            other than 0 and when nothing was scheduled.
        dtype: name of the torch dtype of the rows.
        peaks: largest magnitude of each row, float32 array ``[layers, tokens]``, computed beside the model.
        token_ids: int64 array ``[tokens]`` that the model was given, or None where it was given embeddings.
        positions: int64 array ``[tokens]`` that the model was given, or None where positions are not one number a token.
    """

    chunks: tuple[Chunk, ...] = ()
    rows: Any = None
    dtype: str = ""
    peaks: Any = None
    token_ids: Any = None
    positions: Any = None
    layer_calls: tuple[int, ...] = field(default=())
