"""Selection, application, failure and undo. Fakes where the real packages cannot be at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

import fakes

IMPORT = """
import spec_vllm_compat
from speculators.data_generation import VllmHiddenStatesGenerator
"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_import_loads_nothing_and_works_without_anything(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, speculators=None, vllm=None)
    code = """
    import sys, spec_vllm_compat
    assert not {"torch", "vllm", "speculators"} & set(sys.modules)
    print(spec_vllm_compat.report())
    assert not {"torch", "vllm", "speculators"} & set(sys.modules)
    """
    done = fakes.run(site, code)
    assert done.returncode == 0, done.stderr
    assert "vllm not installed" in done.stdout


def test_import_loads_next_to_nothing(tmp_path: Path) -> None:
    """What it costs a process that never extracts is measured by benchmarks/import_time.py; this is what it loads."""
    site = fakes.environment(tmp_path)
    code = """
    import os, sys
    before = set(sys.modules)
    import spec_vllm_compat
    print(*sorted(set(sys.modules) - before))
    print(sorted(spec_vllm_compat.__all__) == sorted(n for n in spec_vllm_compat.__all__ if hasattr(spec_vllm_compat, n)))
    """
    done = fakes.run(site, code)
    loaded, complete = done.stdout.splitlines()
    ours = [f"spec_vllm_compat{name}" for name in ("", "._version", ".errors", ".registry")]
    assert set(loaded.split()) - {"__future__"} == set(ours), done.stderr
    assert complete == "True"


@pytest.mark.parametrize(
    ("speculators", "vllm", "said"),
    [
        ("0.3.0", None, "vLLM is not installed"),
        ("0.3.0", "0.10.2", "older than 0.11"),
        ("0.2.0", "0.16.0", "no generator that spec_vllm_compat knows"),
        ("0.5.0", "0.24.0", "removed in 0.5"),
        (None, "0.16.0", "speculators is not installed"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_in_one_sentence(
    tmp_path: Path, speculators: str | None, vllm: str | None, said: str
) -> None:
    site = fakes.environment(tmp_path, speculators=speculators, vllm=vllm)
    for attempt in (
        IMPORT,
        IMPORT.replace(
            "import spec", "try:\n    import speculators.data_generation\nexcept ImportError: pass\nimport spec"
        ),
    ):
        done = fakes.run(site, attempt)
        assert done.returncode == 1
        assert last_line(done.stderr).startswith("spec_vllm_compat.errors.UnsupportedVersionError"), done.stderr
        assert said in last_line(done.stderr)
        assert ">=0.3" in last_line(done.stderr) or "<0.5" in last_line(done.stderr)
        if speculators is None or vllm is None:
            break  # without the package, speculators' own import fails first where we come second


def test_speculators_05_keeps_its_other_uses(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, speculators="0.5.0")
    done = fakes.run(site, "import spec_vllm_compat, speculators.data_generation as d; print(hasattr(d, 'other'))")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_a_patch_set_that_cannot_apply_stops_the_entry_point_every_time(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, code=fakes.VLLM.replace("unique_reply_rank=None", "only_rank=None"))
    code = f"""{IMPORT}
for attempt in range(2):
    try:
        VllmHiddenStatesGenerator()
    except spec_vllm_compat.PatchError as error:
        print(error.patch_set, "|", error)
    import importlib, speculators.data_generation.vllm_hidden_states_generator
print("failure" if spec_vllm_compat.report().failure else "no failure")
"""
    done = fakes.run(site, code)
    assert done.returncode == 0, done.stderr
    first, second, failure = done.stdout.strip().splitlines()
    assert first == second
    assert first.startswith(
        "reply_rank | patch set 'reply_rank' cannot be applied: expected MultiprocExecutor.collective"
    )
    assert "found no such parameter" in first
    assert failure == "failure"


def test_late_import_of_ours_fails_every_time_if_patching_fails(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, code=fakes.VLLM.replace("unique_reply_rank=None", "only_rank=None"))
    code = """
    from speculators.data_generation import VllmHiddenStatesGenerator
    for attempt in range(2):
        try:
            import spec_vllm_compat
            print("imported")
        except RuntimeError as error:
            print(type(error).__name__)
    """
    done = fakes.run(site, code)
    assert done.stdout.split() == ["PatchError", "PatchError"], done.stderr


def test_half_imported_speculators_is_refused(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, code="import spec_vllm_compat\n" + fakes.VLLM)
    done = fakes.run(site, "from speculators.data_generation import VllmHiddenStatesGenerator")
    assert "half imported" in last_line(done.stderr)


def test_the_probe_beats_the_version_and_it_is_said(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, code=fakes.VLLM.replace("is_encoder_decoder,", "is_encoder_decoder=False,"))
    done = fakes.run(site, IMPORT + "print(spec_vllm_compat.report())")
    assert "is_encoder_decoder: not needed" in done.stdout
    assert "the probe decides" in done.stdout
    assert "the probe decides" in done.stderr


@pytest.mark.parametrize("vllm", ["0.1.dev1+gabc", "0.16.0rc2.dev123+gabc"])
def test_probes_decide_where_the_version_is_unknown(tmp_path: Path, vllm: str) -> None:
    site = fakes.environment(tmp_path, vllm=vllm)
    done = fakes.run(site, IMPORT + "print(*spec_vllm_compat.report().applied)")
    assert {"is_encoder_decoder", "kv_cache_specs", "two_phase"} <= set(done.stdout.split()), done.stderr
    assert "result_order" not in done.stdout.split()


def test_above_the_tested_range_one_warning(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, vllm="0.99.0")
    done = fakes.run(site, IMPORT)
    assert done.stderr.count("has not been tested") == 1, done.stderr
    assert "with speculators 0.3.0); every probe holds" in done.stderr


def test_tested_is_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_vllm_compat import support
    from spec_vllm_compat.versions import Installed, Versions

    monkeypatch.setattr(support, "TESTED", {"0.3.0": ("0.11.0", "0.32.0"), "0.4.0": (), "0.4.0.1": ("0.16.0",)})

    def tested(vllm: str, speculators: str) -> bool:
        found = (Installed(name, text, "test") for name, text in (("vllm", vllm), ("speculators", speculators)))
        return support.is_tested(Versions(*found, Installed("torch", None, ""), Installed("transformers", None, "")))

    assert tested("0.11.0.post2", "0.3.0")
    assert tested("0.32.0+cpu", "0.3.0")
    assert tested("0.16.0", "0.4.0.1")
    assert not tested("0.16.0", "0.4.0")
    assert not tested("0.13.0", "0.3.0")
    assert not tested("0.16.0", "0.3.0")


def test_switched_off(tmp_path: Path) -> None:
    code = IMPORT + "import spec_vllm_compat.registry as r; r.install(); print(spec_vllm_compat.report().active)"
    done = fakes.run(fakes.environment(tmp_path), code, SPEC_VLLM_COMPAT="off")
    assert done.stdout.strip() == "False"
    assert done.stderr.count("changes nothing") == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_undo_is_exact_and_twice_is_once(tmp_path: Path, order: str) -> None:
    first = "import spec_vllm_compat" if order == "before" else "pass"
    code = f"""
    import sys
    meta_path = list(sys.meta_path)
    {first}
    from speculators.data_generation import vllm_hidden_states_generator as module
    cls = module.VllmHiddenStatesGenerator
    def state():
        return {{**vars(module)}}, {{**vars(cls)}}
    def same(a, b):
        return all(x.keys() == y.keys() and all(x[k] is y[k] for k in x) for x, y in zip(a, b))
    if {order == "before"}:
        spec_vllm_compat.uninstall()
        original = state()
        spec_vllm_compat.install()
    else:
        original = state()
        import spec_vllm_compat
    patched = state()
    assert not same(original, patched)
    assert spec_vllm_compat.report().applied
    spec_vllm_compat.install()
    assert same(patched, state())
    spec_vllm_compat.uninstall()
    assert same(original, state())
    assert not spec_vllm_compat.report().active
    left = [f for f in sys.meta_path if f not in meta_path]
    assert [type(f).__name__ for f in left] == ["ImportHookFinder"], left
    """
    done = fakes.run(fakes.environment(tmp_path), code)
    assert done.returncode == 0, done.stderr


def test_every_symbol_has_one_owner(tmp_path: Path) -> None:
    code = (
        IMPORT
        + """
import spec_vllm_compat.registry as r
from dataclasses import replace
from spec_vllm_compat import patches, seams
print(len(r._state.installation.owners))
doubled = replace(patches.two_phase.PATCH_SET, record=replace(patches.two_phase.RECORD, id="other"))
spec_vllm_compat.uninstall()
patches.PATCH_SETS += (doubled,)
try:
    spec_vllm_compat.install()
except spec_vllm_compat.PatchError as error:
    print(error)
"""
    )
    done = fakes.run(fakes.environment(tmp_path), code)
    owners, error = done.stdout.strip().splitlines()
    assert int(owners) > 15
    assert "MultiprocExecutor.execute_model to have one owner" in error
    assert "'two_phase'" in error


@pytest.mark.parametrize("again", ["importlib.reload(module)", "del sys.modules[name]; importlib.import_module(name)"])
def test_a_second_import_of_the_generator_is_not_left_unpatched(tmp_path: Path, again: str) -> None:
    code = (
        IMPORT
        + f"""
import importlib, sys
from speculators.data_generation import vllm_hidden_states_generator as module
name = module.__name__
try:
    {again}
except spec_vllm_compat.CompatError as error:
    print(error)
spec_vllm_compat.uninstall()
sys.modules.pop(name, None)
module = importlib.import_module(name)
spec_vllm_compat.install()
print(type(vars(module.VllmHiddenStatesGenerator)["generate"]).__name__)
"""
    )
    done = fakes.run(fakes.environment(tmp_path), code)
    error, kind = done.stdout.strip().splitlines()
    assert "found a second import" in error
    assert kind == "FunctionWrapper"
