"""Selects patch sets by version and probe, applies them when speculators is imported, undoes them, reports.

Nothing here imports torch, vLLM or speculators: everything happens in post-import hooks. Whatever `install` does not need
is imported in the function that does, so that a process which never extracts pays next to nothing.
"""

from __future__ import annotations

import os
import sys

from spec_vllm_compat.errors import CompatError, PatchError, UnsupportedVersionError

TYPE_CHECKING = False  # as typing's, which takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from logging import Logger
    from types import FrameType, ModuleType
    from typing import Any

    from spec_vllm_compat.records import Record
    from spec_vllm_compat.reports import PatchReport, Report
    from spec_vllm_compat.seams import Completion, Installation
    from spec_vllm_compat.versions import Versions

GENERATOR_PACKAGE = "speculators.data_generation"
GENERATOR_MODULE = f"{GENERATOR_PACKAGE}.vllm_hidden_states_generator"
GENERATOR_CLASS = "VllmHiddenStatesGenerator"
SWITCH = "SPEC_VLLM_COMPAT"
_SAID = "_SPEC_VLLM_COMPAT_SAID_OFF"


class _State:
    def __init__(self) -> None:
        self.active = False
        self.hooked = False
        self.completing = False
        self.installation: Installation | None = None  # once the generator module is patched
        self.failure: CompatError | None = None
        self.patches: list[PatchReport] = []
        self.undo: list[Callable[[], Any]] = []


_state = _State()


def _logger() -> Logger:
    import logging

    return logging.getLogger("spec_vllm_compat")


def install() -> None:
    """Arrange that speculators' hidden-states generator is patched as soon as it is imported.

    Called by ``import spec_vllm_compat``; a second call changes nothing. A generator module that is already imported is
    patched at once; generators built before stay unpatched and refuse to go on. ``SPEC_VLLM_COMPAT=off`` (or ``0``,
    ``false``) in the environment disables everything, with one warning.

    Raises:
        CompatError: speculators is imported already and cannot be patched, or is only half imported. A failure that
            happens later, while speculators is imported, is raised where a generator is built, and by a second call.
    """
    if _state.active:
        if _state.failure is not None:  # a second import must not succeed unpatched
            raise _state.failure
        return
    if os.environ.get(SWITCH, "").lower() in {"off", "0", "false"}:
        if _SAID not in os.environ:  # once, and not again in every worker
            os.environ[_SAID] = "1"
            _logger().warning("%s=%s: spec_vllm_compat is imported but changes nothing", SWITCH, os.environ[SWITCH])
        return
    half = sys.modules.get(GENERATOR_MODULE)
    if half is not None and getattr(half.__spec__, "_initializing", False):  # wrapt would run the hook on it at once
        raise CompatError(
            f"expected to be imported before speculators; found {GENERATOR_MODULE} half imported. "
            "Put `import spec_vllm_compat` before the first import of speculators."
        )
    _state.active = True
    sys.meta_path.insert(0, _GATE)
    if _state.hooked:
        for name, hook in ((GENERATOR_PACKAGE, _package_imported), (GENERATOR_MODULE, _generator_imported)):
            if name in sys.modules:
                hook(sys.modules[name])
    elif "speculators" in sys.modules:
        _register_hooks()
    if _state.failure is not None:
        raise _state.failure


def _register_hooks() -> None:
    if _state.hooked:  # wrapt has no way to take a hook back; the hooks ask whether we are active
        return
    _state.hooked = True
    import wrapt

    wrapt.register_post_import_hook(_package_imported, GENERATOR_PACKAGE)
    wrapt.register_post_import_hook(_generator_imported, GENERATOR_MODULE)


def uninstall() -> None:
    """Take every change back: names, methods and import hooks are as they were before ``install()``.

    Generators that exist already raise until ``install()`` is called again; new ones are those of speculators alone.
    """
    if not _state.active:
        return
    _state.active = _state.completing = False
    if _GATE in sys.meta_path:
        sys.meta_path.remove(_GATE)
    if _state.installation is not None:
        _state.installation.undo()
    while _state.undo:
        _state.undo.pop()()
    _state.installation, _state.failure, _state.patches = None, None, []


def report() -> Report:
    """What is installed, which patch sets apply and why, and what failed.

    Returns:
        The state of this process now. ``print(report())`` gives the text for a bug report. Patch sets are decided when
        speculators' generator is imported; before that the list is empty.
    """
    from spec_vllm_compat import remote_code, support
    from spec_vllm_compat.reports import Report
    from spec_vllm_compat.versions import detect

    versions = detect()
    session = sys.modules.get("spec_vllm_compat.driver.session")
    return Report(
        active=_state.active,
        versions=tuple(versions),
        tested=support.is_tested(versions),
        patches=tuple(_state.patches),
        failure=_state.failure,
        remote_code=remote_code.sentence(),
        generators=tuple(session.sentences()) if session is not None else (),
    )


class _Gate:
    """Import finder that finds nothing; it stops the import of the generator where no patch set could help.

    A post-import hook would come too late: the module's own imports fail first, with a message about some name in vLLM.
    """

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name not in ("speculators", GENERATOR_PACKAGE, GENERATOR_MODULE):
            return None
        from spec_vllm_compat import support
        from spec_vllm_compat.versions import detect

        if (
            name == "speculators"
            and _is_import()
            and not any(finder.find_spec(name, None) for finder in sys.meta_path if finder is not self)
        ):
            raise support.no_speculators()
        if name == "speculators":
            _register_hooks()
        if name in ("speculators", GENERATOR_PACKAGE) and _is_import() and detect().speculators.present:
            _complete_modules()
        if name == GENERATOR_MODULE and _state.installation is not None and (name in sys.modules or _is_import()):
            raise CompatError(
                f"expected {name} to be imported once; found a second import (a reload, or it was taken out of "
                "sys.modules), which would not be patched. Start a new process, or call spec_vllm_compat.uninstall() before "
                "and install() after it."
            )
        if name in (GENERATOR_PACKAGE, GENERATOR_MODULE):
            if _state.failure is not None:
                raise _state.failure
            versions = detect()
            too_new = support.without_generator(versions)
            if not (too_new and name == GENERATOR_PACKAGE):  # that package has other uses in speculators 0.5
                support.require(versions)
        return None


_GATE = _Gate()


def _is_import() -> bool:
    """Whether the finder is asked by an import, and not by somebody who only wants to know (``find_spec``)."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def _package_imported(module: ModuleType) -> None:
    """speculators 0.5 and newer have no generator: explain it where somebody asks for one."""
    if not _state.active or hasattr(module, GENERATOR_CLASS) or hasattr(module, "__getattr__"):
        return

    def explain(name: str) -> Any:
        if name == GENERATOR_CLASS:
            from spec_vllm_compat import support
            from spec_vllm_compat.versions import detect

            support.require(detect())
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = explain  # type: ignore[method-assign]
    _state.undo.append(lambda: vars(module).pop("__getattr__", None))


def _complete_modules() -> None:
    """Arrange that modules which lack a name that speculators imports get it as soon as they are imported."""
    from functools import partial

    import wrapt

    from spec_vllm_compat.patches import PATCH_SETS

    if _state.completing:
        return
    _state.completing = True
    for patch_set in PATCH_SETS:
        for completion in patch_set.completes:  # a module that is imported already is completed at once
            wrapt.register_post_import_hook(partial(_complete, patch_set.record.id, completion), completion.module)


def _complete(patch_set: str, completion: Completion, module: ModuleType) -> None:
    """Add what is missing. Never raises: an error in a hook would break the first import only."""
    from functools import partial

    if not _state.completing:
        return
    try:
        missing = completion.missing(module)
    except Exception as error:  # noqa: BLE001 - it is raised again where the generator is imported
        _state.failure = CompatError(
            f"patch set {patch_set!r} cannot complete {module.__name__}: {type(error).__name__}: {error}"
        )
        return
    for name, value in missing.items():
        setattr(module, name, value)
        _state.undo.append(partial(vars(module).pop, name, None))
        if getattr(value, "__name__", "") == (submodule := f"{module.__name__}.{name}"):
            sys.modules[submodule] = value
            _state.undo.append(partial(sys.modules.pop, submodule, None))


def _generator_imported(module: ModuleType) -> None:
    """Patch the generator module. Never raises: an error in a hook would break the first import only."""
    if not _state.active or _state.installation is not None:
        return
    try:
        _apply(module)
    except CompatError as error:
        _fail(module, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must stop the generator and not be lost
        _fail(module, CompatError(f"patching {module.__name__} failed: {type(error).__name__}: {error}"))


def _apply(module: ModuleType) -> None:
    from spec_vllm_compat import support
    from spec_vllm_compat.patches import PATCH_SETS
    from spec_vllm_compat.reports import PatchReport
    from spec_vllm_compat.seams import Installation, PatchSet, SeamMissing, Target
    from spec_vllm_compat.versions import detect

    versions = detect()
    support.require(versions)
    target = Target(module, versions)
    selected: list[PatchSet] = []
    for patch_set in PATCH_SETS:
        record = patch_set.record
        by_version = _by_version(record, versions)
        try:
            probe = patch_set.probe(target)
        except SeamMissing as missing:
            raise PatchError(
                record.id, expected=missing.expected, found=missing.found, remedy=support.advice(versions)
            ) from missing
        outcome = PatchReport(record=record, applied=probe.needed, by_version=by_version, found=probe.found)
        _state.patches.append(outcome)
        if probe.needed:
            selected.append(patch_set)
        if outcome.disagree:
            _logger().warning("%s", outcome.sentence())
    _state.installation = Installation(target)
    _state.installation.apply(selected)
    if not support.is_tested(versions):
        _logger().warning("%s", support.untested_sentence(versions))


def _by_version(record: Record, versions: Versions) -> bool | None:
    answers = [versions.vllm.matches(record.vllm), versions.speculators.matches(record.speculators)]
    if record.transformers is not None:
        answers.append(versions.transformers.matches(record.transformers))
    if False in answers:
        return False
    return None if None in answers else True


def _fail(module: ModuleType, error: CompatError) -> None:
    """Remember the failure and make every attempt to build a generator raise it."""
    _state.failure = error
    _state.installation = None
    _logger().error("%s", error)
    cls = vars(module).get(GENERATOR_CLASS)
    if cls is None:
        return

    import wrapt

    def refuse(_wrapped: Any, _instance: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        raise error

    original = vars(cls)["__init__"]
    cls.__init__ = wrapt.FunctionWrapper(original, refuse)
    _state.undo.append(lambda: setattr(cls, "__init__", original))


__all__ = ["UnsupportedVersionError", "install", "report", "uninstall"]
