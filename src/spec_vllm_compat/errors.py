"""Errors. Each names what was expected, what was found and what to do."""

from __future__ import annotations


class CompatError(RuntimeError):
    """Base class of everything that spec_vllm_compat raises on purpose."""


class UnsupportedVersionError(CompatError, ImportError):
    """The installed speculators and vLLM are not a pair that extraction can run on."""


class PatchError(CompatError):
    """A patch set that should apply cannot be applied.

    Args:
        patch_set: id of the patch set.
        expected: what the patch set relies on.
        found: what is really there.
        remedy: what the reader can do about it.
    """

    def __init__(self, patch_set: str, *, expected: str, found: str, remedy: str) -> None:
        self.patch_set = patch_set
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(f"patch set {patch_set!r} cannot be applied: expected {expected}; found {found}. {remedy}")


class WorkerMismatchError(CompatError):
    """A worker process does not run what the driver runs."""


class InvalidBatchError(CompatError, ValueError):
    """The batch given to ``generate()`` cannot be extracted; nothing was started."""


class ExtractionError(CompatError):
    """The rows of a request are missing, doubled or not what the model computed."""
