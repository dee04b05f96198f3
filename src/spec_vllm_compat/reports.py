"""The report: what is installed, which patch sets apply and why."""

from __future__ import annotations

from dataclasses import dataclass

from spec_vllm_compat._version import __version__
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.layer_ids import MEANING
from spec_vllm_compat.records import Record
from spec_vllm_compat.versions import Installed


@dataclass(frozen=True)
class PatchReport:
    """One patch set in this process.

    Attributes:
        record: the patch set's own record.
        applied: whether it is applied; the probe decides this.
        by_version: what the version ranges alone would say; None when a version is unknown.
        found: what the probe saw.
    """

    record: Record
    applied: bool
    by_version: bool | None
    found: str

    @property
    def disagree(self) -> bool:
        """Version and probe say different things; the probe won."""
        return self.by_version is not None and self.by_version is not self.applied

    def sentence(self) -> str:
        """One line: id, whether it is applied, what the probe saw, and a disagreement with the versions."""
        verb = "applied" if self.applied else "not needed"
        text = f"{self.record.id}: {verb}; {self.found}"
        if self.disagree:
            expected = "to be needed" if self.by_version else "not to be needed"
            text += f" (by version it was expected {expected}; the probe decides)"
        return text


@dataclass(frozen=True)
class Report:
    """State of spec_vllm_compat in this process. ``str()`` gives the text for a bug report.

    Attributes:
        active: False when disabled or uninstalled.
        versions: vLLM, speculators, torch and transformers as found, without importing them.
        tested: whether this pair of vLLM and speculators has been tested.
        patches: one entry a patch set, in order; empty until speculators' generator has been imported.
        failure: why the generator refuses to start, or None.
        remote_code: whether code that comes with a checkpoint may run, and who says so.
        generators: for each living generator its model, the module list of decoder layers, the layers, what a row is.
    """

    active: bool
    versions: tuple[Installed, ...]
    tested: bool
    patches: tuple[PatchReport, ...]
    failure: CompatError | None
    remote_code: str = ""
    generators: tuple[str, ...] = ()

    @property
    def applied(self) -> tuple[str, ...]:
        """Ids of the applied patch sets."""
        return tuple(patch.record.id for patch in self.patches if patch.applied)

    def __str__(self) -> str:
        lines = [f"spec_vllm_compat {__version__} ({'active' if self.active else 'not active'})"]
        lines += [f"  {installed}" for installed in self.versions]
        lines.append(f"  this pair of vLLM and speculators is {'tested' if self.tested else 'NOT tested'}")
        if self.failure is not None:
            lines.append(f"FAILED: {self.failure}")
        elif not self.patches:
            lines.append("patch sets: decided when speculators' generator is imported")
        for patch in self.patches:
            lines.append(f"  [{'x' if patch.applied else ' '}] {patch.sentence()}")
        lines += [self.remote_code] if self.remote_code else []
        lines += [f"generator of {generator}" for generator in self.generators]
        lines.append(f"layer ids: {MEANING} (`spec_vllm_compat.layer_numbering(layer_ids)` states both)")
        return "\n".join(lines)
