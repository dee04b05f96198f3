"""Pages that quote the source say what the source says."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spec_vllm_compat

ROOT = Path(__file__).parent.parent
SOURCE = Path(spec_vllm_compat.__file__).parent
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
OURS, AFTER = "\n## Messages of this library\n", "\n## No message, and yet wrong\n"
#: A probe's finding is quoted within "patch set … cannot be applied"; AttributeErrors are Python's own words.
NOT_LISTED = {"SeamMissing", "AttributeError", "_cannot"}


def _template(node: ast.expr) -> str | None:
    """A string of the source, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(re.sub(r"%[sdr]", "…", node.value).split(" "))
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def _parsed() -> Iterator[ast.Module]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """Every string of the source that is no docstring."""
    found = []
    for tree in _parsed():
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        templates = (_template(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
        found += [text for text in templates if text and text not in docstrings]
    return found


def _raised() -> list[str]:
    """Messages of all errors and usage errors that the source makes."""
    found = []
    for tree in _parsed():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            text = _template(node.args[0])
            if name.endswith(("Error", "SeamMissing")) and name not in NOT_LISTED and text:
                found.append(text)
    return found


def _page() -> str:
    return TROUBLESHOOTING.read_text(encoding="utf-8")


def _quotes(text: str) -> list[str]:
    """The messages at the head of the items of a list: code, and what joins it."""
    found = []
    for item in re.findall(r"^ *\* +(`.*?)(?=^ *\* |^#|^$|\Z)", text, re.M | re.S):
        head = re.match(r"(?:`[^`]+`(?:\s*(?:,|or|/|→)\s*)?)+", item)
        assert head, item
        found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", head[0])]
    return found


def _matches(quote: str, template: str) -> bool:
    """Whether a quote is a part of a message; … on the page may stand for more than one filled-in part."""
    pattern = ".*".join(re.escape(part) for part in quote.strip("…. ").split("…"))
    return re.search(pattern, template, re.S) is not None


def test_every_message_of_ours_on_the_page_occurs_in_the_source(strings: list[str]) -> None:
    quotes = _quotes(_page().partition(OURS)[2].partition(AFTER)[0])
    assert len(quotes) > 70
    gone = [quote for quote in quotes if not any(_matches(quote, text) for text in strings)]
    assert not gone, f"no longer in the source: {gone}"


def test_every_message_of_the_source_is_on_the_page() -> None:
    quotes = _quotes(_page().partition(OURS)[2].partition(AFTER)[0])
    raised = [text for text in _raised() if len(re.sub(r"[^a-z]", "", text)) > 8]
    assert len(raised) > 60
    missing = [text for text in raised if not any(len(quote) > 12 and _matches(quote, text) for quote in quotes)]
    assert not missing, f"docs/troubleshooting.md does not list: {missing}"


@pytest.mark.parametrize(
    "quote", ["nothing says this", "token_ids is full: expected …", "request …: expected … cows; found …"]
)
def test_an_invented_message_is_found_out(quote: str, strings: list[str]) -> None:
    assert not any(_matches(quote, text) for text in strings)


def test_every_message_that_a_patch_set_quotes_is_on_the_page() -> None:
    page = " ".join(_page().partition(OURS)[0].split())
    said = []
    for path in sorted((SOURCE / "patches").glob("*.py")):
        for text in filter(
            None, map(_template, (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.expr)))
        ):
            said += re.findall(r"«([^»]+)»", text)
    assert len(said) > 12
    for message in said:
        for part in re.split(r"…|\(\d+\)", message):
            assert part.strip(" .") in page, f"docs/troubleshooting.md does not list {message!r}"


@pytest.mark.stack
@pytest.mark.parametrize(
    ("message", "package", "file"),
    [
        ("State error: sample_tokens() must be called after execute_model() returns None.", "vllm", "v1/worker/gpu_model_runner.py"),
        ("Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one unified type", "vllm", "v1/core/kv_cache_utils.py"),
        ("max_num_batched_tokens (…) is smaller than max_model_len (…). This effectively limits the maximum sequence length", "vllm", "config/scheduler.py"),
        ("Failed to infer device type", "vllm", "config/device.py"),
        ("Cannot re-initialize CUDA in forked subprocess", "torch", "cuda/__init__.py"),
        ("Failed to capture hidden states from worker", "speculators", "data_generation/vllm_hidden_states_generator.py"),
        ("Layer index … out of bounds [0, …]", "speculators", "data_generation/vllm_hidden_states_generator.py"),
        ("Request … not found in captured states. Available: …", "speculators", "data_generation/vllm_hidden_states_generator.py"),
    ],
)  # fmt: skip
def test_messages_of_others_are_theirs(message: str, package: str, file: str) -> None:
    from spec_vllm_compat.versions import detect

    if message.startswith("Request") and not detect().speculators.matches(">=0.4"):
        pytest.skip("a message of speculators 0.4")
    assert f"`{message}" in " ".join(_page().partition(OURS)[0].split())
    location = getattr(detect(), package).location
    strings = map(
        _template, (node for node in ast.walk(ast.parse((location / file).read_text())) if isinstance(node, ast.expr))
    )
    assert any(_matches(message, text) for text in strings if text)


@pytest.mark.stack
def test_the_truth_value_of_a_tensor() -> None:
    import torch

    message = "Boolean value of Tensor with more than one value is ambiguous"
    assert f"`{message}`" in _page()
    with pytest.raises(RuntimeError, match=message):
        bool(torch.ones(2))


def test_files_are_loaded_without_running_code_as_the_security_page_says() -> None:
    calls = [node for tree in _parsed() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func).endswith(("torch.load", "pickle.load", "pickle.loads"))]
    assert loads
    for call in loads:
        assert "weights_only=True" in [ast.unparse(keyword).replace(" ", "") for keyword in call.keywords], ast.unparse(
            call
        )


# ------------------------------------------------------------------------------------------------- commands on pages


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _fenced(page: Path) -> tuple[list[tuple[str, str]], str]:
    """The blocks of a page as (language, text), and what is outside of them."""
    parts = re.split(r"^```(.*)\n", page.read_text(encoding="utf-8"), flags=re.M)
    blocks = [(parts[i], parts[i + 1]) for i in range(1, len(parts) - 1, 4)]
    return blocks, "".join(parts[0::4])


def _commands(page: Path, program: str) -> list[list[str]]:
    """Calls of a program in the blocks of a page and in its code spans."""
    blocks, rest = _fenced(page)
    shell = [text.replace("\\\n", " ") for language, text in blocks if language in ("", "sh")]
    lines = [line.removeprefix("$ ").strip() for text in shell for line in text.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", rest)]
    return [line.split() for line in lines if line.startswith(f"{program} ")]


def test_commands_and_options_on_pages_exist() -> None:
    from spec_vllm_compat.cli import cli

    seen = set()
    for page in PAGES:
        for _, name, *words in _commands(page, "spec-vllm-compat"):
            if name.startswith("-"):
                continue
            command = cli.commands[name] if name in cli.commands else cli.get_command(None, name)  # type: ignore[arg-type]
            assert command is not None, f"{page.name}: no command {name}"
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            given = {word.partition("=")[0] for word in words if word.startswith("--")} if name != "run" else set()
            assert given <= known | {"--help"}, f"{page.name}: {name} has no {given - known}"
            seen.add(name)
    assert seen >= {"doctor", "preflight", "extract", "verify", "run"}


def test_make_targets_on_pages_exist() -> None:
    rules = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "matrix.mk", "bench.mk"))
    targets = set(re.findall(r"^([a-z-]+):", rules, re.M))
    named = {word for page in PAGES for call in _commands(page, "make") for word in call[1:] if word.isalpha()}
    assert {"demo", "test", "site", "contract"} <= named <= targets


def test_commands_of_the_start_page_are_run_with_the_readme() -> None:
    start, readme = (
        {text for language, text in _fenced(page)[0] if language == "sh"}
        for page in (ROOT / "docs" / "start.md", ROOT / "README.md")
    )
    assert start
    assert start <= readme


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    directives = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert {name.rpartition(".")[2] for name in directives} >= set(spec_vllm_compat.__all__) - {"__version__"}


# ------------------------------------------------------------------------------------- docs/adding-a-patch-set.md


def _blocks(language: str) -> list[str]:
    return [text for found, text in _fenced(ROOT / "docs" / "adding-a-patch-set.md")[0] if found == language]


def _apply(diff: str, root: Path) -> None:
    """Make the change that a block of the page shows: + after the line before it, or in place of the - before it."""
    head, *lines = diff.splitlines()
    file = root / head.removeprefix("--- ")
    text, before = file.read_text(), ""
    for line in lines:
        if line.startswith("+"):
            text = text.replace(before, f"{before}{line[1:]}\n", 1) if before else text
            before = f"{line[1:]}\n"
        elif line.startswith("-"):
            assert text.count(f"{line[1:]}\n") == 1, line
            text, before = text.replace(f"{line[1:]}\n", "\0", 1), "\0"
        elif line != "@@":
            before = f"{line[1:]}\n"
            assert text.count(before) == 1, line
    file.write_text(text.replace("\0", ""))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which the walk-through has been followed."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(SOURCE, root / "src" / "spec_vllm_compat", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("tests", "tools"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "docs").mkdir()
    module, test = _blocks("python")
    (root / "src" / "spec_vllm_compat" / "patches" / "prefill_policy.py").write_text(module)
    for diff in _blocks("diff"):
        _apply(diff, root)
    with (root / "tests" / "test_patch_sets.py").open("a") as file:
        file.write(f"\n\n{test}")
    return root


def _python(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_the_walk_through_works(extended: Path) -> None:
    said = _python(extended, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_patch_sets.py", "-k", "policy")
    assert said.startswith("0\n")
    assert "3 passed" in said


def test_the_walk_through_is_in_the_generated_page(extended: Path) -> None:
    pytest.importorskip("numpy")
    assert _python(extended, "tools/render_docs.py").startswith("0\n")
    page = (extended / "docs" / "patch-sets.md").read_text()
    assert (
        "| [prefill_policy](#prefill_policy) | `SchedulerConfig` requires `prefill_policy`. | vLLM `>=0.34` |" in page
    )


def test_the_contract_sees_the_change_of_the_walk_through(extended: Path, tmp_path: Path) -> None:
    config = tmp_path / "vllm" / "config" / "__init__.py"
    config.parent.mkdir(parents=True)
    config.write_text(
        "class SchedulerConfig:\n    max_num_seqs: int\n    max_num_batched_tokens: int\n    prefill_policy: str\n"
    )
    (tmp_path / "vllm" / "__init__.py").write_text("")
    message = _blocks("")[1]
    assert "requires prefill_policy, which nobody passes" in message
    assert message in _python(ROOT, "tools/contract.py", str(tmp_path))
    assert "prefill_policy" not in _python(extended, "tools/contract.py", str(tmp_path))
