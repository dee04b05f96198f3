"""Whether code that comes with a checkpoint may run."""

from __future__ import annotations

import os

VARIABLE = "SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE"


def trusted() -> bool:
    """True unless ``SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE=0``: speculators trusts it without being asked."""
    return os.environ.get(VARIABLE, "").lower() not in {"0", "off", "false", "no"}


def sentence() -> str:
    """For reports."""
    if trusted():
        return f"code that comes with a checkpoint is trusted, as speculators has it ({VARIABLE}=0 turns it off)"
    return f"code that comes with a checkpoint is not run ({VARIABLE}={os.environ[VARIABLE]})"
