"""Which pairs are supported: the allowed range, the tested range, and what to say outside of them."""

from __future__ import annotations

from spec_vllm_compat.errors import UnsupportedVersionError
from spec_vllm_compat.versions import Versions

#: Requirement strings, compared with pre-releases allowed.
VLLM_ALLOWED = ">=0.11"
SPECULATORS_ALLOWED = ">=0.3,<0.5"

#: speculators to the vLLM releases that it was run with, every row right. Written by tools/render_matrix.py.
TESTED: dict[str, tuple[str, ...]] = {
    "0.3.0": (
        "0.11.0",
        "0.11.1",
        "0.11.2",
        "0.12.0",
        "0.13.0",
        "0.14.0",
        "0.14.1",
        "0.15.0",
        "0.15.1",
        "0.16.0",
        "0.17.0",
        "0.17.1",
        "0.18.0",
        "0.18.1",
        "0.19.0",
        "0.19.1",
        "0.20.0",
        "0.20.1",
        "0.20.2",
        "0.21.0",
        "0.22.0",
        "0.22.1",
        "0.23.0",
        "0.24.0",
        "0.25.0",
        "0.25.1",
        "0.26.0",
        "0.27.0",
        "0.27.1",
        "0.28.0",
        "0.29.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
    ),
    "0.4.0": (
        "0.11.0",
        "0.11.1",
        "0.11.2",
        "0.12.0",
        "0.13.0",
        "0.14.0",
        "0.14.1",
        "0.15.0",
        "0.15.1",
        "0.16.0",
        "0.17.0",
        "0.17.1",
        "0.18.0",
        "0.18.1",
        "0.19.0",
        "0.19.1",
        "0.20.0",
        "0.20.1",
        "0.20.2",
        "0.21.0",
        "0.22.0",
        "0.22.1",
        "0.23.0",
        "0.24.0",
        "0.25.0",
        "0.25.1",
        "0.26.0",
        "0.27.0",
        "0.27.1",
        "0.28.0",
        "0.29.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
    ),
    "0.4.0.1": (
        "0.11.0",
        "0.11.1",
        "0.11.2",
        "0.12.0",
        "0.13.0",
        "0.14.0",
        "0.14.1",
        "0.15.0",
        "0.15.1",
        "0.16.0",
        "0.17.0",
        "0.17.1",
        "0.18.0",
        "0.18.1",
        "0.19.0",
        "0.19.1",
        "0.20.0",
        "0.20.1",
        "0.20.2",
        "0.21.0",
        "0.22.0",
        "0.22.1",
        "0.23.0",
        "0.24.0",
        "0.25.0",
        "0.25.1",
        "0.26.0",
        "0.27.0",
        "0.27.1",
        "0.28.0",
        "0.29.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
    ),
}  # end


def _tested_text(versions: Versions | None = None) -> str:
    """The tested releases of vLLM, for the installed speculators where one is."""
    for speculators, releases in TESTED.items():
        if versions is not None and versions.speculators.matches(f"=={speculators}"):
            return f"vLLM {', '.join(releases) or 'none'} with speculators {speculators}"
    releases = max(TESTED.values(), key=len)
    return f"vLLM {releases[0]} to {releases[-1]}, the releases in docs/support.md"


_WORKING = f"Working pairs: speculators {SPECULATORS_ALLOWED} with vLLM {VLLM_ALLOWED} (tested: {_tested_text()})."


def without_generator(versions: Versions) -> bool:
    """speculators 0.5 removed the in-process generator (speculators pull request 433)."""
    return versions.speculators.matches(">=0.5") is True


def no_speculators() -> UnsupportedVersionError:
    return UnsupportedVersionError(f"speculators is not installed; `pip install 'speculators==0.3.0'`. {_WORKING}")


def require(versions: Versions) -> None:
    """Raise :class:`UnsupportedVersionError` unless patch sets can help with the installed pair."""
    speculators, vllm = versions.speculators, versions.vllm
    if not speculators.present:
        raise no_speculators()
    if without_generator(versions):
        raise UnsupportedVersionError(
            f"speculators {speculators.text} has no VllmHiddenStatesGenerator (removed in 0.5) and needs nothing from "
            "spec_vllm_compat: it takes hidden states from vLLM's own `extract_hidden_states` (vLLM 0.17 and newer, "
            "see its data generation guide). To keep the in-process generator, `pip install 'speculators<0.5'`."
        )
    if speculators.matches(SPECULATORS_ALLOWED) is False:
        raise UnsupportedVersionError(
            f"speculators {speculators.text} has no generator that spec_vllm_compat knows. {_WORKING}"
        )
    if not vllm.present:
        raise UnsupportedVersionError(
            f"vLLM is not installed: expected a module `vllm`, found none. Install the vLLM that your model needs. {_WORKING}"
        )
    if vllm.matches(VLLM_ALLOWED) is False:
        raise UnsupportedVersionError(f"vLLM {vllm.text} is older than 0.11, the first that is supported. {_WORKING}")


def is_tested(versions: Versions) -> bool:
    return any(
        versions.speculators.matches(f"=={speculators}")
        and any(versions.vllm.matches(f"=={vllm}") for vllm in releases)
        for speculators, releases in TESTED.items()
    )


def untested_sentence(versions: Versions) -> str:
    return (
        f"vLLM {versions.vllm.text} with speculators {versions.speculators.text} has not been tested "
        f"(tested: {_tested_text(versions)}); every probe holds, going on"
    )


def advice(versions: Versions) -> str:
    """What to do when a probe does not find what its patch set relies on."""
    return (
        f"vLLM {versions.vllm.text} is {'' if is_tested(versions) else 'not '}among the tested versions "
        f"({_tested_text(versions)}). Install one of them, or report this text."
    )
