"""What driver and workers say to each other. Importable in both; needs neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
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
class Segment:
    """Host memory of ``size`` bytes that the driver has made and a worker on the same host can map.

    ``path`` leads through the driver's file descriptors: the memory has no name in any file system, so nothing is left
    behind however the processes end.
    """

    number: int
    path: str
    size: int


@dataclass(frozen=True)
class Layout:
    """Where everything that one call of ``generate()`` captures lies in its buffer.

    First the rows: request by request, layer by layer, ``[tokens of the request, hidden_size]`` each, so that every
    tensor handed out is one piece. Then, for the guard: magnitudes ``float32 [layers, tokens]``, token ids and positions
    ``int64 [tokens]`` as the model was given them.

    Attributes:
        segment: the buffer, or None where rows travel in the replies.
        requests: request id to (tokens of all requests before it, its own tokens).
        tokens: tokens of the whole call.
        layers: number of captured layers.
        hidden_size: values a row.
        dtype: name of the torch dtype of the rows.
        itemsize: bytes of one value.
    """

    segment: Segment | None
    requests: dict[str, tuple[int, int]]
    tokens: int
    layers: int
    hidden_size: int
    dtype: str
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.itemsize

    def rows_at(self, before: int, own: int, layer: int, start: int = 0) -> int:
        """Byte offset of row ``start`` of one request and layer (as an index into the captured layers)."""
        return (before * self.layers + layer * own + start) * self.row_bytes

    @property
    def peaks_at(self) -> int:
        return -(-self.tokens * self.layers * self.row_bytes // 64) * 64

    @property
    def token_ids_at(self) -> int:
        return -(-(self.peaks_at + 4 * self.layers * self.tokens) // 64) * 64

    @property
    def positions_at(self) -> int:
        return self.token_ids_at + 8 * self.tokens

    @property
    def size(self) -> int:
        return self.positions_at + 8 * self.tokens


@dataclass(frozen=True)
class Inline:
    """What a step captured, where it cannot be put into the driver's memory.

    Attributes:
        rows: bytes of the rows, uint8 array ``[layers, tokens, hidden_size * itemsize]``.
        peaks: largest magnitude of each row, float32 array ``[layers, tokens]``.
        token_ids: int64 array ``[tokens]`` or None, see :class:`Step`.
        positions: int64 array ``[tokens]`` or None.
    """

    rows: Any
    peaks: Any
    token_ids: Any
    positions: Any


@dataclass(frozen=True)
class Step:
    """What one executed scheduler step gave on one rank.

    Attributes:
        chunks: rows by request, in the order of the batch that the model runner ran.
        layer_calls: how often each captured layer ran.
        token_ids: whether the model was given token ids (and not embeddings).
        positions: whether it was given one position a token.
        inline: the captured rows themselves, where they are not in the driver's memory; rank 0 only.
        samples: in the first step, some values of what each captured layer returned, for a comparison of the ranks.
    """

    chunks: tuple[Chunk, ...] = ()
    layer_calls: tuple[int, ...] = ()
    token_ids: bool = False
    positions: bool = False
    inline: Inline | None = None
    samples: tuple[float, ...] = ()
