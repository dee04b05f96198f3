"""Makes the in-process hidden-states generator of speculators 0.3 and 0.4 work with the installed vLLM.

``import spec_vllm_compat`` before speculators is all there is to do::

    import spec_vllm_compat
    from speculators.data_generation import VllmHiddenStatesGenerator

Importing loads neither torch, vLLM nor speculators and works without them.
"""

from spec_vllm_compat._version import __version__
from spec_vllm_compat.errors import (
    CompatError,
    ExtractionError,
    InvalidBatchError,
    PatchError,
    UnsupportedVersionError,
    WorkerMismatchError,
)
from spec_vllm_compat.registry import install, report, uninstall

TYPE_CHECKING = False  # as typing's, which takes longer to import than all of this
if TYPE_CHECKING:
    from spec_vllm_compat.layer_ids import LayerNumbering, layer_numbering

__all__ = [
    "CompatError",
    "ExtractionError",
    "InvalidBatchError",
    "LayerNumbering",
    "PatchError",
    "UnsupportedVersionError",
    "WorkerMismatchError",
    "__version__",
    "install",
    "layer_numbering",
    "report",
    "uninstall",
]


def __getattr__(name: str) -> object:
    if name in ("LayerNumbering", "layer_numbering"):  # imported when asked for: `import spec_vllm_compat` stays quick
        from spec_vllm_compat import layer_ids

        return getattr(layer_ids, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
