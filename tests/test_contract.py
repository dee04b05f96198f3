"""The contract: what patch sets lean on, checked in vLLM's sources; and that the check can fail."""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from contract import Lean, Sources, problems
from contract_symbols import LEANS

FILES = {
    "vllm/_version.py": "__version__ = version = '9.8.7'\n",
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig\nfrom .cache import Other as Renamed\n",
    "vllm/config/cache.py": """
class Base:
    inherited: int = 1
class CacheConfig(Base):
    block_size: int = Field(default=None, gt=0)
    must: int
    listed: list = field(default_factory=list)
    internal: int = field(default=0, init=False)
    def method(self, a, b=1, *, c, **rest): self.attribute, self.second = a, b
if TYPE_CHECKING:
    class Other: pass
""",
}


@pytest.fixture(params=["folder", "wheel"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("")
    if request.param == "folder":
        return Sources(tmp_path / "site")
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for path in (tmp_path / "site").rglob("*.py"):
            wheel.write(path, path.relative_to(tmp_path / "site"))
    return Sources(tmp_path / "vllm.whl")


LEAN = Lean("block_size", "vllm.config:CacheConfig", "generator", "x", passes=("must", "block_size"))


@pytest.mark.parametrize(
    ("lean", "wrong"),
    [
        (LEAN, None),
        (replace(LEAN, passes=("must", "inherited")), None),
        (replace(LEAN, passes=("block_size",)), "requires must, which nobody passes"),
        (replace(LEAN, passes=("must", "gone")), "no parameter gone"),
        (replace(LEAN, passes=("must", "internal")), "no parameter internal"),
        (replace(LEAN, passes=("block_size",), may_pass=("must", "gone")), None),
        (replace(LEAN, symbol="vllm.config:Gone"), "no such symbol"),
        (replace(LEAN, symbol="vllm.gone:CacheConfig"), "no such symbol"),
        (replace(LEAN, symbol="vllm.gone:CacheConfig|vllm.config:CacheConfig"), None),
        (replace(LEAN, symbol="vllm.config:Gone", when="vllm.config:AlsoGone"), None),
        (replace(LEAN, symbol="vllm.config:Gone", when="vllm.config:CacheConfig(gone)"), None),
        (replace(LEAN, symbol="vllm.config:Gone", when="vllm.config:CacheConfig(must)"), "no such symbol"),
        (replace(LEAN, symbol="vllm.config:CacheConfig.inherited", passes=()), None),
        (replace(LEAN, symbol="vllm.config:CacheConfig.second", passes=()), None),
        (replace(LEAN, symbol="vllm.config:CacheConfig.third", passes=()), "no such symbol"),
        (replace(LEAN, symbol="vllm.config:CacheConfig.method", passes=("a", "c", "more")), None),
        (replace(LEAN, symbol="vllm.config:CacheConfig.method", passes=("a",)), "requires c, which nobody passes"),
        (replace(LEAN, symbol="vllm.config:Renamed", passes=()), None),
    ],
)
def test_what_is_not_as_needed_is_named(sources: Sources, lean: Lean, wrong: str | None) -> None:
    assert lean.wrong(sources) == wrong
    assert sources.version == "9.8.7"


def test_an_empty_vllm_breaks_everything(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert len(problems(Sources(tmp_path))) == sum(lean.when is None for lean in LEANS)


@pytest.mark.stack
def test_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert problems(Sources(Path(spec.origin).parent.parent)) == []


@pytest.mark.stack
def test_every_patch_set_that_leans_on_vllm_is_there() -> None:
    from spec_vllm_compat.patches import PATCH_SETS

    named = {lean.patch_set for lean in LEANS}
    every = {patch_set.record.id for patch_set in PATCH_SETS}
    assert named <= every
    on_others = {"aux_hidden_states", "device_name", "memory_query", "result_order", "transformers_5"}
    assert every - named == on_others
