"""What a patch set says about itself. Reports, docs and tables are generated from these records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """Why a patch set exists."""

    UPSTREAM = "upstream change"
    CORRECTNESS = "correctness"
    PLATFORM = "platform"


class Process(str, Enum):
    """Where the code of a patch set runs."""

    DRIVER = "driver"
    WORKER = "driver and workers"


@dataclass(frozen=True)
class Record:
    """The record of one patch set.

    Attributes:
        id: stable name; says what changed upstream, not how we cope.
        kind: upstream change, correctness or platform.
        why: what goes wrong without it, in the words a user would see.
        changed: what changed upstream and when.
        source: upstream version, file or pull request that shows it.
        vllm: versions of vLLM that need it, as a requirement string.
        speculators: versions of speculators that need it, as a requirement string.
        transformers: versions of Transformers that need it; None: it does not depend on them.
        probed_by: what the probe looks at; the probe decides, the versions document.
        remove_when: condition under which it can be deleted.
        process: which processes run its code.
    """

    id: str
    kind: Kind
    why: str
    changed: str
    source: str
    vllm: str
    speculators: str
    probed_by: str
    remove_when: str
    process: Process = Process.DRIVER
    transformers: str | None = None
