"""`run`, `doctor`, `preflight` and the frame of the command line. No model and, but for the marked ones, no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


WRONG = [
    ["no-such-command"],
    ["extract"],
    ["run"],
    ["run", "nowhere.py"],
    ["run", "-m"],
    ["run", "-x"],
    ["verify", "nowhere"],
    ["preflight", "model", "--layer-ids"],
    ["preflight", "model", "--layer-ids", "two"],
    ["extract", "--model-path", "m", "--prepared-data", "d", "--output-dir", "o", "--shard-index", "1"],
]
HEAVY = {"torch", "vllm", "speculators", "transformers", "datasets", "numpy"}


def modules_of(*arguments: str) -> tuple[int, set[str]]:
    """Exit status, and the packages that were imported."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_is_two_at_once(arguments):
    status, imported = modules_of(*arguments)
    assert status == 2
    assert "click" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize(
    "command", [[], ["doctor"], ["preflight"], ["extract"], ["verify"], ["convert"], ["run"], ["env"]]
)
def test_help_loads_nothing_heavy(command):
    status, imported = modules_of(*command, "--help")
    assert status == 0
    assert "click" in imported
    assert not imported & HEAVY


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
    # in the command, in the script and in its child
    assert done.stdout.splitlines() == ["own sitecustomize"] * 3 + ["1"], done.stderr


def test_errors_of_the_script_are_its_own(tmp_path):
    (tmp_path / "job.py").write_text("raise KeyError('mine')")
    done = call("run", "job.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert "No module named nothing" in call("run", "-m", "nothing", cwd=tmp_path).stderr


def test_a_python_that_ignores_its_environment_is_refused(tmp_path):
    (tmp_path / "job.py").write_text("print('ran')")
    code = f"import sys; sys.path[:0] = {os.environ.get('PYTHONPATH', '').split(os.pathsep)!r}\n"
    code += "from spec_vllm_compat.cli import main; main(['run', 'job.py'])"
    done = subprocess.run([sys.executable, "-E", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PYTHONPATH" in done.stderr


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch, tmp_path):
    """Findings of `doctor` in this process, with the probe's answer given."""
    pytest.importorskip("click")
    from spec_vllm_compat.cli import doctor

    answer = {
        "early": [],
        "generator": {"patches": [["two_phase", True, "two_phase: applied", False]], "failure": None, "file": "f"},
        "torch": {"version": "2.10.0", "cuda_build": None, "devices": []},
        "vllm": {"device": "cpu", "v2_runner": False},
    }  # fmt: skip
    monkeypatch.setattr(doctor, "_probe", lambda: (answer, None))

    def find(**changed):
        answer.update(changed)
        return {finding.id: finding for finding in doctor.examine(tmp_path)}

    return find


def test_doctor_says_whether_a_checkpoint_s_own_code_runs(findings, monkeypatch):
    monkeypatch.delenv("SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE", raising=False)
    assert "is trusted" in findings()["remote_code"].reason
    monkeypatch.setenv("SPEC_VLLM_COMPAT_TRUST_REMOTE_CODE", "0")
    assert "is not run" in findings()["remote_code"].reason


def test_doctor_shut_out_by_vllm_plugins(findings, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_elses")
    found = findings()["plugin"]
    assert found.status == "warn"
    assert found.remedy


def test_env():
    done = call("env", VLLM_API_KEY="secret", VLLM_PLUGINS="x")
    assert done.returncode == 0
    assert "speculators" in done.stdout
    assert "VLLM_PLUGINS=x" in done.stdout
    assert "secret" not in done.stdout
    assert done.stdout.startswith("```")


def test_doctor_says_why_operators_are_missing():
    pytest.importorskip("click")
    from spec_vllm_compat.cli.doctor import _operators

    found = _operators("ImportError: version `GLIBC_2.38' not found")
    assert found.status == "warn"
    assert "GLIBC_2.38" in found.reason
    assert _operators("").status == "ok"


def test_doctor_names_variables_and_no_secret(findings, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    found = findings()
    assert "VLLM_LOGGING_LEVEL=DEBUG" in found["variables"].reason
    assert "secret" not in str(found)
    assert "CPU" in found["system"].reason
    assert "triton " in found["packages"].reason


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


def test_doctor_says_which_signal_ended_the_imports(monkeypatch, tmp_path):
    from spec_vllm_compat.cli import doctor

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ILL $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    _, problem = doctor._probe()
    assert "SIGILL: this vLLM's build uses an instruction that this CPU does not have" in problem


@pytest.mark.stack
def test_doctor_on_a_healthy_environment():
    done = call("doctor", "--json")
    found = {finding["id"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["patch_sets"]["status"] == "ok"
    assert "two_phase: applied" in found["patch_sets"]["reason"]


# -- the judge of verify and preflight ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("far", "wrong"), [(0, []), (3, []), (5, [1]), (8, [1])])
def test_a_short_sample_that_is_wrong_as_a_whole_does_not_pass_for_rounding(monkeypatch, far, wrong):
    """In a model with experts, some rows of any engine are far off; here three of Transformers' own, all in sample 0."""
    torch = pytest.importorskip("torch")
    from spec_vllm_compat.cli import compare

    torch.manual_seed(3)
    exact = {n: torch.randn(n, 16) for n in (100, 8)}
    rounded = {n: rows.clone() for n, rows in exact.items()}
    rounded[100][:3] *= 2

    class Model:
        def __init__(self, _path, **_how):
            self.rows = exact

        def round_to(self, _dtype):
            self.rows = rounded

        def __call__(self, ids, layers):
            return {layer: self.rows[len(ids)] for layer in layers}

    monkeypatch.setattr(compare, "Reference", Model)
    ours = {n: rows.clone() for n, rows in exact.items()}
    ours[8][:far] = torch.randn(far, 16)
    samples = [{"input_ids": torch.zeros(n), "hidden_states": [rows]} for n, rows in ours.items()]
    _, found = compare.compare("model", samples, [2])
    assert [index for index, _ in found] == wrong


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


def test_a_small_copy_can_be_shared_by_devices_and_fits_the_kernels_of_quantised_weights():
    from spec_vllm_compat.cli.shrink import shrink

    shared = shrink({**FULL, "moe_intermediate_size": 2048}, keep_vocabulary=False, tp_size=8)
    assert (shared["num_attention_heads"], shared["num_key_value_heads"]) == (32, 16)
    assert shared["moe_intermediate_size"] // 8 == 128
    for width in (56, 64, 80, 96, 100, 128):  # DeepSeek-V3 names no head_dim: 7168 / 128 is 56
        full = {**FULL, "head_dim": None, "hidden_size": 32 * width}
        small = shrink(full, keep_vocabulary=False, tp_size=4)
        assert small["hidden_size"] == small["num_attention_heads"] * width
        assert not small["hidden_size"] // 4 % 128
        assert not small["intermediate_size"] // 4 % 128


def test_shrinking_inside_a_vision_wrapper():
    from spec_vllm_compat.cli.shrink import shrink

    vision = {"depth": 27, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096}
    small = shrink({"architectures": ["Y"], "text_config": FULL, "vision_config": vision}, keep_vocabulary=False)
    assert small["vision_config"] == {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 512}
    assert small["text_config"]["num_hidden_layers"] == 6


@pytest.mark.parametrize(
    ("words", "layers"),
    [(["--layer-ids", "2", "30", "58", "m"], (2, 30, 58)), (["m", "--layer-ids=2,30"], (2, 30)), (["m"], ())],
)
def test_layer_ids(words, layers):
    from spec_vllm_compat.cli.preflight import command

    parsed = command.make_context("preflight", list(words)).params
    assert (parsed["model"], parsed["layer_ids"]) == ("m", layers)


def target(tmp_path: Path, **more: Any) -> Any:
    from spec_vllm_compat.cli.target import read_target

    path = tmp_path / "config.json"
    path.write_text(json.dumps({**FULL, **more}))
    return read_target(str(path))


def test_a_models_own_code_is_not_run_unasked(tmp_path):
    from spec_vllm_compat import CompatError

    with pytest.raises(CompatError, match="pass --trust-remote-code"):
        target(tmp_path, auto_map={"AutoConfig": "own.Config"}, hidden_size=None)


@pytest.mark.parametrize(
    ("more", "tp_size", "expected"),
    [
        ({}, 1, 2 * 2 * 8 * 128 * 48),  # K and V, 2 bytes, 8 heads of 128, 48 layers
        ({}, 4, 2 * 2 * 2 * 128 * 48),
        ({}, 16, 2 * 2 * 1 * 128 * 48),  # a head is not split
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 8, 2 * 576 * 48),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}, -8, 2 * 2 * 4 * 192 * 48),  # MLA off
    ],
)
def test_bytes_of_kv_cache_a_token(tmp_path, monkeypatch, more, tp_size, expected):
    from spec_vllm_compat.cli.preflight import _kv_bytes

    monkeypatch.setenv("VLLM_MLA_DISABLE", "1" if tp_size < 0 else "0")
    tp_size = abs(tp_size)
    assert _kv_bytes(target(tmp_path, **more), tp_size) == expected


def test_quantisation_is_named(tmp_path):
    from spec_vllm_compat.cli.preflight import _quantisation

    assert _quantisation(target(tmp_path)) == ""
    assert _quantisation(target(tmp_path, quantization_config={"quant_method": "fp8"})) == "fp8"
    inside = {"text_config": {**FULL, "quantization_config": {"quant_method": "compressed-tensors", "format": "int"}}}
    assert _quantisation(target(tmp_path, **inside)) == "compressed-tensors int"


def test_a_comparison_must_tell_right_rows_from_wrong_ones(tmp_path):
    torch = pytest.importorskip("torch")
    from spec_vllm_compat import CompatError
    from spec_vllm_compat.cli.trial import Trial

    dense, routed = (Trial.__new__(Trial) for _ in range(2))
    dense.config, routed.config = {}, {"num_experts": 8}
    good, bad = torch.full((100,), 0.01), torch.full((100,), 0.9)
    few = good.clone()
    few[:5] = 0.9
    assert "0 beyond 0.1" in dense._judge("x", good, bad, 0.1)
    assert "5 beyond 0.1" in routed._judge("x", few, bad, 0.1)
    for trial, own, neighbours, text in (
        (dense, few, bad, "rows differ from x"),
        (routed, bad, bad, "rows differ from x"),
        (dense, good, good, "could not tell right rows from wrong ones"),
    ):
        with pytest.raises(CompatError, match=text):
            trial._judge("x", own, neighbours, 0.1)


@pytest.mark.parametrize(("why", "fails"), [("layer 1 holds layer 2", True), ("layer 1 has 9 of 9 rows off", False)])
def test_rows_of_another_layer_are_no_matter_for_log_probabilities(tmp_path, monkeypatch, why, fails):
    pytest.importorskip("torch")
    from spec_vllm_compat import CompatError
    from spec_vllm_compat.cli import compare
    from spec_vllm_compat.cli.trial import Trial

    monkeypatch.setattr(compare, "compare", lambda *_args, **_how: ("9 rows", [(0, why)]))
    trial = Trial.__new__(Trial)
    trial.place, trial.trust_remote_code, trial.lines = tmp_path, False, []
    if fails:
        with pytest.raises(CompatError, match=f"rows differ from Transformers: {why}"):
            trial._as_transformers([], [0, 1, 2])
    else:
        assert not trial._as_transformers([], [0, 1, 2])
    assert trial.lines == [f"compared   with Transformers in float32: DIFFERENT: {why}; 9 rows"]


def test_a_copy_that_was_not_quantised_is_no_trial_of_it(tmp_path):
    from spec_vllm_compat import CompatError
    from spec_vllm_compat.cli.trial import Trial

    made = {}
    for kept in (True, False):
        read = target(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
        pytest.importorskip("transformers")
        made[kept] = Trial.__new__(Trial)
        made[kept]._written_by_transformers = lambda: True
        how = {"full": False, "quantized": kept, "trust_remote_code": False, "tp_size": 1}
        made[kept].__init__(read, tmp_path / str(kept), **how)
        written = json.loads((tmp_path / str(kept) / "config.json").read_text())
        assert ("quantization_config" in written) is kept is made[kept].quantized
    with pytest.raises(CompatError, match="found UnquantizedLinearMethod alone"):
        made[True]._is_quantized(["UnquantizedLinearMethod"])
    made[True]._is_quantized(["GPTQLinearMethod", "UnquantizedLinearMethod"])
    assert made[True].lines == ["layers     GPTQLinearMethod"]


def test_the_error_of_a_worker_is_found_in_what_it_said(tmp_path, capfd):
    from spec_vllm_compat.cli.preflight import _last_error, _written_to

    log = tmp_path / "log"
    os.write(1, b"before\n")
    with log.open("wb", buffering=0) as file, _written_to(os.dup(file.fileno())):
        said = "(Worker pid=7) ERROR 11-30 16:24:36 [multiproc_executor.py:783] "
        place = '  File "/x/site-packages/vllm/y.py", line 3, in load'
        code = f"print({said!r} + {place!r}); print({said!r} + 'KeyError: model.layers.1'); print('[W] later')"
        os.write(1, b"within\n")
        subprocess.run([sys.executable, "-c", code], check=True)
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"
    assert log.read_text().startswith("within\n")
    assert _last_error(log) == "KeyError: model.layers.1 (vllm/y.py:3, load)"
    log.write_text("nothing")
    assert _last_error(log) == "no error of it was seen"


@pytest.mark.stack
def test_random_weights_are_the_same_every_time_and_of_like_size():
    import torch

    from spec_vllm_compat.cli.weights import randomise

    def model() -> torch.nn.Module:
        made = torch.nn.Module()
        for name, value in {
            "embed": torch.empty(512, 64), "norm": torch.empty(64), "bias": torch.empty(64),
            "weight": torch.empty(128, 64, dtype=torch.float8_e4m3fn), "weight_scale": torch.empty(128),
            "w2_weight_scale": torch.empty(8, 4, dtype=torch.uint8),
            "qweight": torch.empty(8, 128, dtype=torch.int32), "g_idx": torch.full((64,), 7, dtype=torch.int32),
        }.items():  # fmt: skip
            made.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        randomise(made)
        return made

    first, second = (dict(model().named_parameters()) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)), name
    assert first["embed"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert first["norm"].mean().item() == pytest.approx(1, abs=0.05)
    assert first["weight"].float().std().item() == pytest.approx(1, rel=0.1)
    assert first["weight_scale"].unique().tolist() == pytest.approx([0.04])
    assert first["w2_weight_scale"].unique().tolist() == [121]
    assert not first["g_idx"].any()
    assert first["qweight"].unique().numel() > 1000
