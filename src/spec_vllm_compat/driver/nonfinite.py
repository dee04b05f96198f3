"""What to do about rows that hold NaN or infinite values."""

from __future__ import annotations

import os

from spec_vllm_compat.errors import CompatError

#: ``SPEC_VLLM_COMPAT_NONFINITE=error``, the default: ``generate()`` raises and names request, layer and row.
#: ``SPEC_VLLM_COMPAT_NONFINITE=warn``: it logs a warning that names them and returns the rows as they are.
VARIABLE = "SPEC_VLLM_COMPAT_NONFINITE"

ADVICE = f"Leave the sequence out, look for an overflow of the dtype, or set {VARIABLE}=warn to get such rows."


def allowed() -> bool:
    """Whether such rows are returned with a warning. Read at every call.

    Raises:
        CompatError: the variable is neither ``error`` nor ``warn``.
    """
    value = os.environ.get(VARIABLE, "error")
    if value not in {"error", "warn"}:
        raise CompatError(f"{VARIABLE}: expected 'error' or 'warn'; found {value!r}. Unset it or correct it.")
    return value == "warn"
