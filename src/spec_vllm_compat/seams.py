"""How a patch set reaches speculators: by rebinding names of its generator module.

The generator module binds what it needs from vLLM at its top. Those bindings are the seam. Four kinds of change are
possible, and every changed symbol has exactly one owner:

* :class:`Keyword` adapts one keyword of a call that speculators makes,
* :class:`Members` overrides methods of a vLLM class that speculators instantiates, in a subclass only speculators sees,
* :class:`Name` rebinds or shadows a name,
* :class:`Wrap` wraps a method of the generator class itself: the exception, for what has no seam.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

from spec_vllm_compat.errors import PatchError
from spec_vllm_compat.records import Record
from spec_vllm_compat.registry import GENERATOR_CLASS
from spec_vllm_compat.versions import Versions

_ABSENT = object()

if TYPE_CHECKING:
    Mixin: Any = object
else:
    #: Base of classes that only exist to be mixed into a class of vLLM: their ``super()`` is that class.
    Mixin = object


@dataclass(frozen=True)
class Target:
    """What probes look at and changes are made to.

    Attributes:
        module: the imported generator module of speculators.
        versions: what is installed.
    """

    module: ModuleType
    versions: Versions

    def bound(self, name: str) -> Any:
        """The object that the generator module binds to ``name``."""
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise SeamMissing(f"the name {name} in {self.module.__name__}", "no such name") from None

    def binds(self, name: str) -> bool:
        return hasattr(self.module, name)

    def passes(self, method: str, keyword: str) -> bool:
        """Whether a method of the generator class passes ``keyword`` in one of its calls, by its compiled constants."""
        code = vars(self.bound(GENERATOR_CLASS))[method].__code__
        return any(keyword in names for names in code.co_consts if isinstance(names, tuple))

    def parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        """Parameters of the callable bound to ``name``."""
        return inspect.signature(self.bound(name)).parameters


class SeamMissing(Exception):
    """A probe did not find what the patch set relies on."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected, self.found = expected, found


@dataclass(frozen=True)
class Probe:
    """Answer of a probe: whether the patch set is needed, and what was seen."""

    needed: bool
    found: str


@dataclass(frozen=True)
class Keyword:
    """``adapt(target, keywords)`` changes one keyword of the call ``callee(...)`` in place."""

    callee: str
    keyword: str
    adapt: Callable[[Target, dict[str, Any]], None]

    @property
    def symbols(self) -> list[str]:
        return [f"{self.callee}({self.keyword}=)"]


@dataclass(frozen=True)
class Members:
    """The methods of ``mixin`` override those of the class bound to ``cls``; they call on with ``super()``."""

    cls: str
    mixin: type

    @property
    def symbols(self) -> list[str]:
        own = (name for name, value in vars(self.mixin).items() if callable(value) or isinstance(value, property))
        return [f"{self.cls}.{name}" for name in own]


@dataclass(frozen=True)
class Name:
    """``make(target)`` gives the new value of a module-level name; ``module`` is another one than the generator's."""

    name: str
    make: Callable[[Target], Any]
    module: str | None = None

    @property
    def symbols(self) -> list[str]:
        return [self.name if self.module is None else f"{self.module}.{self.name}"]


@dataclass(frozen=True)
class Wrap:
    """``wrapper(wrapped, instance, args, kwargs)`` around a method of the generator class."""

    method: str
    wrapper: Callable[..., Any]

    @property
    def symbols(self) -> list[str]:
        return [f"{GENERATOR_CLASS}.{self.method}"]


Change = Keyword | Members | Name | Wrap


@dataclass(frozen=True)
class Completion:
    """Adds names that speculators imports to a module that has lost them: the last resort, and nothing is replaced.

    ``missing(module)`` gives the names to add once ``module`` has been imported, none where nothing is missing. A new
    module whose name is that of a submodule can be imported as such.
    """

    module: str
    missing: Callable[[ModuleType], Mapping[str, Any]]


@dataclass(frozen=True)
class PatchSet:
    """One record, the probe that decides, and the changes. ``changes`` may depend on the speculators at hand.

    ``completes`` acts before speculators is imported; everything else once its generator module is.
    """

    record: Record
    probe: Callable[[Target], Probe]
    changes: Callable[[Target], tuple[Change, ...]]
    completes: tuple[Completion, ...] = ()


class Installation:
    """Applies changes to the generator module as one piece and takes them back exactly."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._undo: list[tuple[Any, str, Any]] = []
        self.owners: dict[str, str] = {}

    def apply(self, selected: Iterable[PatchSet]) -> None:
        """Apply every change, or none and raise :class:`PatchError`."""
        try:
            self._apply(selected)
        except BaseException:
            self.undo()
            raise

    def _apply(self, selected: Iterable[PatchSet]) -> None:
        by_name: defaultdict[str, list[tuple[str, Change]]] = defaultdict(list)
        for patch_set in selected:
            for change in patch_set.changes(self._target):
                self._claim(patch_set.record.id, change)
                if isinstance(change, Name) and change.module is not None:
                    self._set(import_module(change.module), change.name, change.make(self._target))
                    continue
                name = {Keyword: "callee", Members: "cls", Name: "name", Wrap: "method"}[type(change)]
                prefix = "." if isinstance(change, Wrap) else ""
                by_name[prefix + getattr(change, name)].append((patch_set.record.id, change))
        for name, owned in by_name.items():
            owner, first = owned[0]
            kinds = {isinstance(change, (Name, Wrap)) for _, change in owned}
            if len(kinds) > 1:
                raise _cannot(
                    owner, f"{name} to be either rebound or adapted", "both, by " + ", ".join(o for o, _ in owned)
                )
            if isinstance(first, Wrap):
                cls = self._require(owner, GENERATOR_CLASS)
                original = vars(cls).get(first.method, _ABSENT)
                if original is _ABSENT:
                    raise _cannot(owner, f"the method {GENERATOR_CLASS}.{first.method}", "no such method")
                self._set(cls, first.method, wrapt.FunctionWrapper(original, first.wrapper))
            elif isinstance(first, Name):
                self._set(self._target.module, name, first.make(self._target))
            else:
                original = self._require(owner, name)
                changes = [change for _, change in owned]
                self._set(self._target.module, name, _compose(self._target, original, changes))

    def _claim(self, patch_set: str, change: Change) -> None:
        for symbol in change.symbols:
            other = self.owners.setdefault(symbol, patch_set)
            if other != patch_set:
                raise _cannot(patch_set, f"{symbol} to have one owner", f"it is owned by {other!r} too")

    def _require(self, patch_set: str, name: str) -> Any:
        try:
            return self._target.bound(name)
        except SeamMissing as missing:
            raise _cannot(patch_set, missing.expected, missing.found) from None

    def _set(self, holder: Any, name: str, value: Any) -> None:
        self._undo.append((holder, name, vars(holder).get(name, _ABSENT)))
        setattr(holder, name, value)

    def undo(self) -> None:
        """Take every change back, in reverse order: afterwards ``vars()`` of module and class are as before."""
        while self._undo:
            holder, name, original = self._undo.pop()
            if original is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        self.owners.clear()


def _compose(target: Target, original: Any, changes: list[Any]) -> Any:
    """One adapter for everything that patch sets change about one bound name."""
    keywords = [change for change in changes if isinstance(change, Keyword)]
    mixins = tuple(change.mixin for change in changes if isinstance(change, Members))

    def adapted(kwargs: dict[str, Any]) -> dict[str, Any]:
        for change in keywords:
            change.adapt(target, kwargs)
        return kwargs

    if not mixins:
        # Configuration objects travel to the workers, so they stay instances of vLLM's own classes.
        def call(wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return wrapped(*args, **adapted(dict(kwargs)))

        return wrapt.FunctionWrapper(original, call)

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        super(adapter, self).__init__(*args, **adapted(kwargs))

    # Above the mixins in the method resolution order, so that no mixin sees the old keywords.
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__}
    adapter: Any = type(original.__name__, (*mixins, original), {**namespace, "__init__": construct})
    return adapter


def _cannot(patch_set: str, expected: str, found: str) -> PatchError:
    return PatchError(
        patch_set,
        expected=expected,
        found=found,
        remedy="Use versions listed as tested (`spec_vllm_compat.report()` names yours), or report this text.",
    )
