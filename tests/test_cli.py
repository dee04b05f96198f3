"""`run`, `doctor`, `env` and the frame of the command line. No model and, but for the marked ones, no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "spec_vllm_compat"]


def call(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_teaches_the_workflow():
    done = call("--help")
    assert done.returncode == 0
    order = [
        done.stdout.index(word) for word in ("doctor  ", "preflight MODEL", "extract ...", "verify DIR", "train  ")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["extract"], ["run"], ["run", "nowhere.py"], ["verify", "nowhere"]]
)
def test_wrong_usage_is_two(arguments):
    assert call(*arguments).returncode == 2


def test_importing_the_command_line_loads_nothing_heavy():
    code = "import sys, spec_vllm_compat.cli as c\nfor n in c._COMMANDS: c.cli.get_command(None, n)\n"
    code += "print([m for m in ('torch', 'vllm', 'speculators', 'transformers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_env():
    done = call("env", VLLM_API_KEY="secret", VLLM_PLUGINS="x")
    assert done.returncode == 0
    assert "spec_vllm_compat" in done.stdout
    assert "VLLM_PLUGINS" in done.stdout
    assert "secret" not in done.stdout


# -- run ---------------------------------------------------------------------------------------------------------------

SCRIPT = """
import multiprocessing, pickle, subprocess, sys

LOADED_BY = __name__
SHIM = "spec_vllm_compat" in sys.modules


class Thing:
    pass


def child(queue):
    import __main__
    queue.put((LOADED_BY, SHIM, __main__.__name__, sys.argv[1:], Thing.__module__))


if __name__ == "__main__":
    assert sys.modules["__main__"].Thing is Thing
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    print(SHIM, sys.argv, __file__, __spec__ and __spec__.name, sys.path[0])
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
    code = "import sys; print('spec_vllm_compat' in sys.modules, sys.path)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    sys.exit(7)
"""


def assert_as_python_does(cwd: Path, *arguments: str) -> None:
    """The same as ``python ARGUMENTS``, but that the shim is there, in children too."""
    plain = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    ours = call("run", *arguments, cwd=cwd)
    assert (plain.returncode, ours.returncode) == (7, 7), ours.stderr
    assert plain.stdout.count("False") == 4
    assert ours.stdout == plain.stdout.replace("False", "True")


def test_a_script_is_main_and_so_it_is_in_its_children(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    assert_as_python_does(tmp_path, "job.py", "--help", "-m", "x")


def test_a_module_is_main_too(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/job.py").write_text(SCRIPT)
    assert_as_python_does(tmp_path, "-m", "package.job", "--help")


def test_the_environments_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("print('own sitecustomize')")
    (tmp_path / "job.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    )
    done = call(
        "run", "job.py", cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'own'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    assert done.stdout.splitlines() == ["own sitecustomize", "own sitecustomize", "1"], done.stderr


def test_errors_of_the_script_are_its_own(tmp_path):
    (tmp_path / "job.py").write_text("raise KeyError('mine')")
    done = call("run", "job.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert "No module named nothing" in call("run", "-m", "nothing", cwd=tmp_path).stderr


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch, tmp_path):
    """Findings of `doctor` in this process, with the probe's answer given."""
    pytest.importorskip("click")
    from spec_vllm_compat.cli import doctor

    answer = {
        "early": [],
        "generator": {
            "patches": [["two_phase", True, "two_phase: applied", False]], "failure": None, "file": "f", "hooked": True,
        },
        "torch": {"version": "2.10.0", "cuda_build": None, "devices": []},
        "vllm": {"device": "cpu", "v2_runner": False},
    }  # fmt: skip
    monkeypatch.setattr(doctor, "_probe", lambda: (answer, None))

    def find(**changed):
        answer.update(changed)
        return {finding.id: finding for finding in doctor.examine(tmp_path)}

    return find


def test_doctor_shut_out_by_vllm_plugins(findings, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_elses")
    found = findings()["plugin"]
    assert found.status == "warn"
    assert found.remedy


def test_doctor_switched_off(findings, monkeypatch):
    monkeypatch.setenv("SPEC_VLLM_COMPAT", "off")
    assert findings()["switch"].status == "fail"


def test_doctor_old_wrapt(findings, monkeypatch):
    from spec_vllm_compat.cli import doctor

    original = doctor.importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda name: "1.14.1" if name == "wrapt" else original(name)
    )
    found = findings()["wrapt"]
    assert (found.status, found.remedy) == ("fail", "pip install 'wrapt>=1.16'")


@pytest.mark.parametrize(("speculators", "text"), [("0.5.0", "removed in 0.5"), ("0.2.0", "no generator that")])
def test_doctor_wrong_speculators(findings, monkeypatch, speculators, text):
    monkeypatch.setenv("SPEC_VLLM_COMPAT_SPECULATORS_VERSION", speculators)
    monkeypatch.setenv("SPEC_VLLM_COMPAT_VLLM_VERSION", "0.16.0")
    found = findings()["pair"]
    assert found.status == "fail"
    assert text in found.reason


@pytest.mark.stack
def test_doctor_fork_on_cuda(findings, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert findings()["processes"].status == "ok"
    assert findings(vllm={"device": "cuda", "v2_runner": True})["processes"].status == "fail"


def test_doctor_a_patch_set_that_cannot_be_applied(findings):
    found = findings(generator={"patches": [], "failure": "patch set 'two_phase' cannot be applied", "file": "f"})
    assert found["patch_sets"].status == "fail"


@pytest.mark.stack
def test_doctor_imports_that_fail(findings):
    found = findings(generator={"error": "ImportError: no such name", "at": "x.py:1"})
    assert "no such name" in found["patch_sets"].reason


@pytest.mark.stack
def test_doctor_on_a_healthy_environment():
    done = call("doctor", "--json")
    found = {finding["id"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["patch_sets"]["status"] == "ok"
    assert "two_phase: applied" in found["patch_sets"]["reason"]


# -- preflight ---------------------------------------------------------------------------------------------------------

FULL = {
    "architectures": ["XForCausalLM"],
    "num_hidden_layers": 48, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 150000, "intermediate_size": 12000, "pad_token_id": 149999, "image_token_id": 149000,
    "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 8,
    "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


def test_shrinking_keeps_every_kind_of_layer():
    from spec_vllm_compat.cli.shrink import shrink

    small = shrink(FULL, keep_vocabulary=False)
    assert small["architectures"] == FULL["architectures"]
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 6
    assert set(small["layer_types"]) == {"linear_attention", "full_attention"}
    assert small["head_dim"] == 128
    assert small["hidden_size"] == small["num_attention_heads"] * 128
    assert (small["num_key_value_heads"], small["num_experts"], small["num_experts_per_tok"]) == (2, 8, 2)
    assert all(0 <= small[name] < small["vocab_size"] for name in ("pad_token_id", "image_token_id"))
    assert shrink(FULL, keep_vocabulary=True)["pad_token_id"] == 149999
    assert FULL["num_hidden_layers"] == 48


def test_shrinking_inside_a_vision_wrapper():
    from spec_vllm_compat.cli.shrink import shrink

    vision = {"depth": 27, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096}
    small = shrink({"architectures": ["Y"], "text_config": FULL, "vision_config": vision}, keep_vocabulary=False)
    assert small["vision_config"] == {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 512}
    assert small["text_config"]["num_hidden_layers"] == 6
