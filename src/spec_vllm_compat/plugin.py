"""Entry point ``vllm.general_plugins``: the second way into worker processes. Does nothing unless a driver asked."""

from __future__ import annotations

import os

from spec_vllm_compat.protocol import WANTED

#: Whether vLLM loaded the plugin in this process on behalf of a driver; the workers' handshake tells it.
loaded = False


def register() -> None:
    """Called by vLLM in every process that loads general plugins, any unrelated ``vllm serve`` included."""
    global loaded
    loaded = os.environ.get(WANTED) == "1"
