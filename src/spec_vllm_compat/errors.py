"""Errors. Each names what was expected, what was found and what to do."""

from __future__ import annotations


class CompatError(RuntimeError):
    """Base class of everything that spec_vllm_compat raises on purpose.

    Raised itself where no subclass fits: speculators was imported too early, a generator's workers are gone, a setting has
    an unknown value.
    """


class UnsupportedVersionError(CompatError, ImportError):
    """The installed speculators and vLLM are not a pair that extraction can run on.

    Raised by the import of ``speculators.data_generation``; an ``ImportError`` too, so that code which does without the
    generator where it is missing goes on doing so.
    """


class PatchError(CompatError):
    """A patch set that should apply cannot be applied.

    Raised whenever a generator is built, not only the first time: nothing runs half patched.

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
    """A worker process does not run what the driver runs.

    Raised while a generator is built, before the first token: versions of spec_vllm_compat and vLLM and the ids of the
    applied patch sets are compared with every rank. The workers are ended.
    """


class InvalidBatchError(CompatError, ValueError):
    """The batch given to ``generate()`` cannot be extracted.

    No sequence, an empty one, something other than integers, a token id outside of the model's vocabulary, or a prompt that
    is larger than the KV cache. Nothing was started, and the generator takes the next batch. A ``ValueError`` too.
    """


class ExtractionError(CompatError):
    """The rows of a request are missing, doubled or not what the model computed, or a worker failed.

    Raised by ``generate()`` instead of returning any row. Requests of that call are dropped and the next call is right,
    unless workers ended or did not answer: then every further call raises ``CompatError``.
    """


#: What usually is behind a signal that ends a process.
_SIGNALS = {
    "SIGKILL": "killed from outside: if nobody did, the kernel was out of memory",
    "SIGILL": "this vLLM's build uses an instruction that this CPU does not have",
    "SIGBUS": "a mapping without memory behind it: is /dev/shm full?",
    "SIGSEGV": "a crash in compiled code",
}


def exit_code(code: int | None) -> str:
    """An exit code; for a negative one, the signal and what usually is behind it."""
    import signal

    try:
        name = signal.Signals(-(code or 0)).name
    except ValueError:
        return str(code)
    return f"{code}, {name}: {_SIGNALS[name]}" if name in _SIGNALS else f"{code}, {name}"
