"""Pages that quote the source say what the source says."""

from __future__ import annotations

import ast
import re
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


@pytest.mark.parametrize("quote", ["nothing says this", "token_ids is full: expected …", "request …: expected … cows; found …"])
def test_an_invented_message_is_found_out(quote: str, strings: list[str]) -> None:
    assert not any(_matches(quote, text) for text in strings)


def test_every_message_that_a_patch_set_quotes_is_on_the_page() -> None:
    page = " ".join(_page().partition(OURS)[0].split())
    said = []
    for path in sorted((SOURCE / "patches").glob("*.py")):
        for text in filter(None, map(_template, (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.expr)))):
            said += re.findall(r"«([^»]+)»", text)
    assert len(said) > 12
    for message in said:
        for part in re.split(r"…|\(\d+\)", message):
            assert part.strip(" .") in page, f"docs/troubleshooting.md does not list {message!r}"
