"""Patch sets for seams that only some vLLM have, on stand-ins that have just that seam."""

from __future__ import annotations

from pathlib import Path

import pytest

import fakes

IMPORT = """
import spec_vllm_compat
from speculators.data_generation import vllm_hidden_states_generator as module
applied = set(spec_vllm_compat.report().applied)
"""
SPEC = "from types import SimpleNamespace as N\n"
GROUPS = "def get_kv_cache_groups(vllm_config, kv_cache_spec): pass"


def ok(site: Path, code: str, **variables: str) -> str:
    done = fakes.run(site, code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def add(site: Path, path: str, text: str) -> None:
    """A module below ``site``; folders become packages."""
    file = site / path
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in file.relative_to(site).parents:
        if folder != Path() and not (site / folder / "__init__.py").exists():
            (site / folder / "__init__.py").write_text("")
    file.write_text(text)


def generator(site: Path, old: str, new: str) -> None:
    path = site / "speculators" / "data_generation" / "vllm_hidden_states_generator.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def moved(site: Path) -> None:
    """Planning functions as in vLLM 0.33: in a module that imports the one they were in."""
    names = ("_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs")
    add(site, "vllm/v1/core/kv_cache_utils.py", "x = 1\n")
    planning = "from vllm.v1.core.kv_cache_utils import x\n" + GROUPS + "\n"
    planning += "".join(
        f"def {name}(vllm_config=None, kv_cache_groups=None, available_memory=0): pass\n" for name in names
    )
    add(site, "vllm/v1/core/kv_cache_planning.py", planning)
    imports = f"from vllm.v1.core.kv_cache_utils import {', '.join(names)}\n\nclass Vllm"
    generator(site, "\nclass Vllm", imports)


@pytest.mark.parametrize("first", ["", "import vllm.v1.core.kv_cache_planning", "import vllm.v1.core.kv_cache_utils"])
def test_moved_planning_functions_are_found_and_taken_back(tmp_path: Path, first: str) -> None:
    site = fakes.environment(tmp_path, vllm="0.33.0")
    moved(site)
    code = f"""
    {first or "pass"}
    import spec_vllm_compat
    from speculators.data_generation import vllm_hidden_states_generator
    import vllm.v1.core.kv_cache_utils as utils
    assert "kv_planning_module" in spec_vllm_compat.report().applied, spec_vllm_compat.report()
    assert "__getattr__" in vars(utils)
    try:
        utils.something_else
    except AttributeError as error:
        print(error)
    spec_vllm_compat.uninstall()
    assert "__getattr__" not in vars(utils)
    """
    assert "has no attribute 'something_else'" in ok(site, code)
    assert fakes.run(site, IMPORT, SPEC_VLLM_COMPAT="off").returncode == 1


def test_nothing_is_completed_where_nothing_is_missing(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path)
    names = "_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs"
    add(site, "vllm/v1/core/kv_cache_utils.py", f"from vllm.everything import {', '.join(names)}\n")
    add(site, "vllm/utils/hashing.py", "def get_hash_fn_by_name(name): pass\n")
    add(site, "transformers/configuration_utils.py", "class C:\n    x: 'str'\n")
    add(site, "transformers/modeling_attn_mask_utils.py", "")
    code = (
        """
    import sys, vllm.v1.core.kv_cache_utils as a, vllm.utils as b, transformers.configuration_utils as c
    before = [dict(vars(m)) for m in (a, b, c)]
    """
        + IMPORT.replace("\n", "\n    ")
        + """
    assert [dict(vars(m)) for m in (a, b, c)] == before
    assert not applied & {"kv_planning_module", "utils_hashing", "transformers_5"}, applied
    """
    )
    ok(site, code)


def test_a_missing_hashing_module(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path, speculators="0.4.0", vllm="0.11.0")
    add(site, "vllm/utils/__init__.py", "def get_hash_fn_by_name(name): pass\n")
    generator(site, "\nclass Vllm", "from vllm.utils.hashing import get_hash_fn_by_name\n\nclass Vllm")
    code = f"""
    import sys
    {IMPORT.replace(chr(10), chr(10) + "    ")}
    assert "utils_hashing" in applied
    assert "vllm.utils.hashing" in sys.modules
    spec_vllm_compat.uninstall()
    assert "vllm.utils.hashing" not in sys.modules
    assert not hasattr(sys.modules["vllm.utils"], "hashing")
    """
    ok(site, code)
    assert "No module named 'vllm.utils.hashing'" in fakes.run(site, IMPORT, SPEC_VLLM_COMPAT="off").stderr


def test_names_of_transformers_4(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path)
    text = "from __future__ import annotations\nclass PreTrainedConfig:\n    dtype: str | torch.dtype | None = None\n"
    add(site, "transformers/configuration_utils.py", text)
    (site / "speculators" / "__init__.py").write_text(
        "import typing\n"
        "from transformers.configuration_utils import PreTrainedConfig\n"
        "typing.get_type_hints(PreTrainedConfig)\n"
        "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask as mask\n"
    )
    code = f"""
    import sys
    {IMPORT.replace(chr(10), chr(10) + "    ")}
    import speculators, transformers.configuration_utils as configuration
    assert "transformers_5" in applied
    try:
        speculators.mask()
    except spec_vllm_compat.CompatError as error:
        print(error)
    spec_vllm_compat.uninstall()
    assert not hasattr(configuration, "torch")
    assert "transformers.modeling_attn_mask_utils" not in sys.modules
    """
    assert "install transformers<5" in ok(site, code)
    assert "'torch' is not defined" in fakes.run(site, IMPORT, SPEC_VLLM_COMPAT="off").stderr


def test_a_completion_that_fails_stops_the_entry_point_every_time(tmp_path: Path) -> None:
    site = fakes.environment(tmp_path)
    add(site, "vllm/utils/__init__.py", "")
    (site / "vllm" / "everything.py").write_text("import vllm.utils\n" + fakes.VLLM)
    code = """
    import spec_vllm_compat
    from spec_vllm_compat import patches, seams
    from dataclasses import replace
    broken = replace(patches.utils_hashing.PATCH_SET, completes=(seams.Completion("vllm.utils", lambda module: 1 / 0),))
    patches.PATCH_SETS = (broken, *patches.PATCH_SETS[1:])
    import vllm.utils, speculators
    for attempt in range(2):
        try:
            import speculators.data_generation
        except spec_vllm_compat.CompatError as error:
            print(error)
    """
    first, second = ok(site, code).strip().splitlines()
    assert (
        first == second == "patch set 'utils_hashing' cannot complete vllm.utils: ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(("field", "expected"), [("user_specified_block_size", "None"), ("something_else", "16")])
def test_the_block_size_is_left_out_where_it_would_be_an_order(tmp_path: Path, field: str, expected: str) -> None:
    init = "block_size=16, enable_prefix_caching=True): pass"
    config = "block_size=None, enable_prefix_caching=True): self.block_size = block_size\n"
    code = fakes.VLLM.replace(init, f"{config}    __dataclass_fields__ = {{'{field}': None}}")
    site = fakes.environment(tmp_path, code=code)
    assert ok(site, IMPORT + "print(module.CacheConfig(block_size=16).block_size)").strip() == expected


SCHEDULER = """
    def __init__(self, vllm_config, kv_cache_config, structured_output_manager=None, block_size=None{more}):
        self.got = {got}
"""


@pytest.mark.parametrize(
    ("more", "got", "resolve", "expected"),
    [
        ("", "(block_size,)", "", "(64,) 64"),
        (
            ", hash_block_size=None",
            "(block_size, hash_block_size)",
            "def resolve_kv_cache_block_sizes(kv_cache_config, vllm_config): return 128, vllm_config.cache_config.block_size",
            "(128, 64) 64",
        ),
    ],
)
def test_the_scheduler_takes_the_block_size_of_the_workers(
    tmp_path: Path, more: str, got: str, resolve: str, expected: str
) -> None:
    init = "    def __init__(self, vllm_config, block_size): pass\n"
    code = fakes.VLLM.replace(init, SCHEDULER.format(more=more, got=got).lstrip("\n"))
    site = fakes.environment(tmp_path, code=code)
    add(site, "vllm/v1/core/kv_cache_utils.py", resolve + "\n")
    script = (
        SPEC
        + IMPORT
        + """
spec = lambda size, **kw: N(kv_cache_spec=N(block_size=size, **kw))
config = N(kv_cache_groups=[spec(128), spec(64), spec(1, prefix_cacheable=False)])
vllm_config = N(cache_config=N(block_size=16))
scheduler = module.Scheduler(vllm_config=vllm_config, kv_cache_config=config, block_size=16)
print(scheduler.got, vllm_config.cache_config.block_size)
"""
    )
    assert ok(site, script).strip() == expected


def test_the_scheduler_may_know_the_block_size(tmp_path: Path) -> None:
    site = fakes.environment(
        tmp_path, speculators="0.4.0", vllm="0.11.0", code=fakes.VLLM.replace(", block_size)", ")")
    )
    generator(site, "dict(kv_cache_specs=None)", "dict(kv_cache_specs=None); Scheduler(vllm_config=1, block_size=16)")
    ok(site, IMPORT + "assert 'scheduler_own_block_size' in applied\nmodule.Scheduler(vllm_config=1, block_size=16)")


@pytest.mark.parametrize(
    ("argument", "default", "needed"), [(True, None, True), (True, True, False), (False, None, False)]
)
def test_small_steps_need_chunked_prefill(tmp_path: Path, argument: bool, default: bool | None, needed: bool) -> None:
    code = fakes.VLLM.replace(
        "enable_chunked_prefill=True): pass", f"enable_chunked_prefill={default}): print(enable_chunked_prefill)"
    )
    site = fakes.environment(tmp_path, speculators="0.4.0", vllm="0.11.0", code=code)
    if argument:
        generator(site, "def __init__(self):", "def __init__(self, max_num_batched_tokens=None):")
    said = ok(site, IMPORT + "print('chunked_prefill' in applied)\nmodule.SchedulerConfig(max_model_len=1)")
    assert said.split() == [str(needed), str(True if needed else default)]


def test_vllm_groups_the_layers(tmp_path: Path) -> None:
    code = fakes.VLLM.replace(
        GROUPS, "def get_kv_cache_groups(vllm_config, kv_cache_spec): return [sorted(kv_cache_spec)]"
    )
    code = code.replace("kv_cache_groups=None): pass", "kv_cache_groups=None): return kv_cache_groups")
    script = (
        SPEC
        + IMPORT
        + """
specs = {"b": N(non_causal=True), "a": N()}
module.unify_hybrid_kv_cache_specs(specs)
groups = module._get_kv_cache_groups_uniform_spec(specs)
vllm_config = N(scheduler_config=N(enable_chunked_prefill=True))
print(module.get_kv_cache_config_from_groups(vllm_config=vllm_config, kv_cache_groups=groups, kv_cache_specs=specs))
print(vllm_config.scheduler_config.enable_chunked_prefill)
"""
    )
    assert ok(fakes.environment(tmp_path, code=code), script).split("\n")[:2] == ["[['a', 'b']]", "False"]


def test_specs_are_passed_where_they_are_required(tmp_path: Path) -> None:
    code = fakes.VLLM.replace(GROUPS, "def get_kv_cache_groups(vllm_config, kv_cache_spec): return kv_cache_spec")
    code = code.replace("kv_cache_groups=None): pass", "kv_cache_groups, kv_cache_specs): return kv_cache_specs")
    site = fakes.environment(tmp_path, speculators="0.4.0", vllm="0.11.2", code=code)
    generator(site, "dict(kv_cache_specs=None)", "dict()")
    generator(site, "(vllm_config=1, kv_cache_specs=2)", "(vllm_config=1)")
    script = (
        SPEC
        + IMPORT
        + """
assert "kv_cache_specs_required" in applied and "kv_cache_specs" not in applied
class Groups(list):
    values = lambda self: []
groups = Groups([N(layer_names=["a", "b"], kv_cache_spec="one"), N(layer_names=["c"], kv_cache_spec=N(kv_cache_specs={"c": 3}))])
print(module.get_kv_cache_config_from_groups(vllm_config=None, kv_cache_groups=groups))
"""
    )
    assert ok(site, script).strip() == "{'a': 'one', 'b': 'one', 'c': 3}"


PLATFORM = """
class current_platform:
    is_cpu = staticmethod(lambda: {cpu})
    is_cuda_alike = staticmethod(lambda: False)
"""


@pytest.mark.parametrize(
    ("space", "cpu", "expected"), [("1", True, 2**30), ("64", True, 2**33), ("0", True, 2**33), ("1", False, 2**33)]
)
def test_the_kv_cache_stays_within_the_space_given(tmp_path: Path, space: str, cpu: bool, expected: int) -> None:
    code = fakes.VLLM.replace(
        "kv_cache_groups=None): pass", "kv_cache_groups=None, available_memory=0): return available_memory"
    )
    site = fakes.environment(tmp_path, code=code)
    add(site, "vllm/platforms/__init__.py", PLATFORM.format(cpu=cpu))
    script = (
        IMPORT
        + "print(module.get_kv_cache_config_from_groups(vllm_config=1, kv_cache_groups={}, available_memory=2**33))"
    )
    assert int(ok(site, script, VLLM_CPU_KVCACHE_SPACE=space)) == expected


EXECUTOR = """
    def get_kv_cache_specs(self): return [{{"a": 1}}, {{"b": 2}}]
    def get_supported_kv_cache_layouts(self): return [["X", "Y"]] * 2
    def set_kv_cache_layout(self, layout_name{more}): self.said = (layout_name{pass_})
    def compile_or_warm_up_model(self): print("warmed up")
    def initialize_from_config(self, configs): print("allocated", configs)
    def collective_rpc("""


@pytest.mark.parametrize("more", ["", ", cp_kv_cache_interleave_size"])
def test_layout_and_warm_up(tmp_path: Path, more: str) -> None:
    executor = EXECUTOR.format(more=more, pass_=more or ",").lstrip("\n")
    site = fakes.environment(tmp_path, vllm="0.33.0", code=fakes.VLLM.replace("    def collective_rpc(", executor))
    resolve = "from types import SimpleNamespace\ndef resolve_kv_cache_layout(config, supported, specs):\n"
    resolve += "    print(supported, specs); return SimpleNamespace(name=supported[0][0])\n"
    add(site, "vllm/v1/attention/backends/utils.py", resolve)
    script = (
        SPEC
        + IMPORT
        + """
from spec_vllm_compat.patches import forward_hooks
forward_hooks.WorkerHandshake._shake_hands = lambda self: None
module.MultiprocExecutor.vllm_config = N(parallel_config=N(cp_kv_cache_interleave_size=7))
executor = module.MultiprocExecutor(vllm_config=1)
print(executor.said)
executor.initialize_from_config([1])
"""
    )
    said = "('X', 7)" if more else "('X',)"
    lines = ok(site, script).strip().splitlines()
    assert lines == ["[['X', 'Y'], ['X', 'Y']] [1, 2]", said, "allocated [1]", "warmed up"]


def test_a_layout_call_that_we_do_not_know_stops_the_entry_point(tmp_path: Path) -> None:
    executor = EXECUTOR.format(more=", another", pass_=",").lstrip("\n")
    site = fakes.environment(tmp_path, vllm="0.99.0", code=fakes.VLLM.replace("    def collective_rpc(", executor))
    done = fakes.run(site, IMPORT + "module.VllmHiddenStatesGenerator()")
    assert "patch set 'kv_cache_layout' cannot be applied" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("available", "expected"), [(False, "NO ACCELERATOR"), (True, "H200")])
def test_the_name_of_a_device_that_is_not_there(tmp_path: Path, available: bool, expected: str) -> None:
    site = fakes.environment(tmp_path, speculators="0.4.0")
    add(site, "speculators/utils/util.py", "def get_device_name(index): return 'H200'\n")
    writer = "from speculators.utils.util import get_device_name\ndef name(): return get_device_name(0)\n"
    add(site, "speculators/data_generation/config_generator.py", writer)
    accelerator = f"\nclass accelerator:\n    is_available = staticmethod(lambda: {available})\n"
    (site / "torch" / "__init__.py").write_text(fakes.TORCH + accelerator)
    script = (
        IMPORT
        + """
assert "device_name" in applied
from speculators.data_generation import config_generator
print(config_generator.name())
spec_vllm_compat.uninstall()
print(config_generator.name(), config_generator.get_device_name is sys.modules["speculators.utils.util"].get_device_name)
"""
    )
    assert ok(site, "import sys\n" + script).splitlines() == [expected, "H200 True"]


def test_no_name_of_a_device_is_asked_for(tmp_path: Path) -> None:
    ok(fakes.environment(tmp_path), IMPORT + "assert 'device_name' not in applied")
