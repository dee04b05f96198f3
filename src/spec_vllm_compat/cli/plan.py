"""What one job of ``extract`` has to do, given what lies in DIR, and the manifest that says what came of it."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import click

from spec_vllm_compat._version import __version__
from spec_vllm_compat.cli import store
from spec_vllm_compat.cli.convert import RECORD as CONVERSION
from spec_vllm_compat.cli.progress import counted, human, shown
from spec_vllm_compat.cli.samples import Prepared, Sample
from spec_vllm_compat.cli.target import TargetModel
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.layer_ids import MEANING
from spec_vllm_compat.versions import detect

WINDOW = 2000  # samples sorted by length together, so that shards fill up one after the other


def manifest_name(options: SimpleNamespace) -> str:
    return "manifest" if options.num_shards == 1 else f"manifest-{options.shard_index}-of-{options.num_shards}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Plan:
    """One shard of one extraction. ``own`` are its samples, :attr:`manifest` what is written about it."""

    def __init__(
        self, options: SimpleNamespace, target: TargetModel, layer_ids: list[int], limit: int, prepared: Prepared
    ):
        self.options, self.target, self.layer_ids, self.limit = options, target, layer_ids, limit
        self.prepared, self.root = prepared, options.output_dir
        total, shards, index = len(prepared.samples), options.num_shards, options.shard_index
        self.own = prepared.samples[total * index // shards : total * (index + 1) // shards]
        self.dtype = target.dtype if options.save_dtype == "auto" else options.save_dtype
        self.manifest_path = self.root / f"{manifest_name(options)}.json"
        self.manifest_written = 0.0
        identity = {
            "model_hash": target.fingerprint(),
            "data_hash": prepared.fingerprint,
            "layer_ids": layer_ids,
            "max_seq_len": limit,
            "shard_size": options.shard_size,
            "save_dtype": self.dtype,
        }
        #: The samples on disk tell whether the data only grew.
        self.other_data = self._differs_in_data(identity)
        before = store.read_json(self.manifest_path)
        command = shlex.join(["spec-vllm-compat", *sys.argv[1:]])
        self.manifest: dict[str, Any] = {
            "format": 1,
            "model": target.path,
            "identity": identity,
            "shard": [index, shards],
            "num_samples": total,
            "skipped": [number for _, number, _ in prepared.bad],
            "layer_meaning": MEANING,
            "pre_norm": True,
            "hidden_size": target.hidden_size,
            "versions": {"spec_vllm_compat": __version__, **{v.module: v.text for v in detect()}},
            "patch_sets": [],
            "status": "running",
            "failed": [],
            "runs": [*(before["runs"] if before else []), {"command": command, "started": now()}],
        }

    def _differs_in_data(self, identity: dict[str, Any]) -> bool:
        """Refuse a directory that was made with other options or by somebody else."""
        manifests = {path: store.read_json(path) for path in sorted(self.root.glob("manifest*.json"))}
        samples, _ = store.find_samples(self.root)
        if (self.root / CONVERSION).exists():
            raise CompatError(f"{self.root} was written by convert. Take another --output-dir.")
        if samples and not manifests:
            raise CompatError(
                f"{self.root} holds {counted(len(samples), 'sample')} and no manifest: something else wrote them. "
                "`verify` tells what they are worth; extract into another --output-dir."
            )
        if samples and not self.options.resume and self.options.num_shards == 1:
            raise CompatError(
                f"--no-resume wants an empty directory, and {self.root} holds {counted(len(samples), 'sample')}. "
                "Leave it out to go on with them, or use another --output-dir."
            )
        other_data = False
        for path, manifest in manifests.items():
            for key in [key for key, value in identity.items() if manifest["identity"].get(key) != value]:
                if key != "data_hash" or path != self.manifest_path:
                    raise CompatError(
                        f"{path} has another {key}: expected {identity[key]}; found {manifest['identity'].get(key)}. "
                        "Use the options of that run, or another --output-dir."
                    )
                other_data = True
        return other_data

    def path(self, sample: Sample) -> Any:
        return store.sample_path(self.root, self.options.shard_size, sample.number)

    def missing(self) -> list[Sample]:
        """Samples that are not there or not what they must be; what a killed run left half-written is removed."""
        missing, wrong = [], []
        for sample in self.own:
            path = self.path(sample)
            store.part_of(path).unlink(missing_ok=True)
            if not path.exists():
                missing.append(sample)
                continue
            problems, _ = store.check_sample(
                path, input_ids=sample.input_ids, loss_mask=sample.loss_mask, layers=len(self.layer_ids),
                hidden_size=self.target.hidden_size, dtype=self.dtype,
            )  # fmt: skip
            if self.other_data and {"ids", "mask"} & {kind for kind, _ in problems}:
                raise CompatError(
                    f"{path} holds another sample than line {sample.line} of {self.options.prepared_data}: the "
                    "directory was made from other data. Use those data, or another --output-dir."
                )
            if problems:
                missing.append(sample)
                wrong.append(f"{path.name}: {problems[0][1]}")
        for text in shown(wrong, 5):
            click.echo(f"extracting again: {text}", err=True)
        return missing

    def begin(self, missing: Sequence[Sample]) -> None:
        """Check the disk, write all that lies beside the samples. Lengths are known: all shards write the same."""
        width = len(self.layer_ids) * self.target.hidden_size * (4 if self.dtype == "float32" else 2) + 16
        need = sum(len(sample.input_ids) * width + 4096 for sample in missing)
        free = shutil.disk_usage(self.root).free
        click.echo(
            f"to extract: {len(missing)} of {counted(len(self.own), 'sample')}, {human(need)}; {human(free)} are free"
        )
        if need > free * 0.98:
            raise CompatError(
                f"{self.root}: expected {human(need)} of free disk; found {human(free)}. Free some, "
                "choose another --output-dir, or take fewer samples or layers. Nothing was started."
            )
        lengths = {str(sample.number): len(sample.input_ids) for sample in self.prepared.samples}
        store.write_json(self.root / "sample_lengths.json", lengths)
        for folder in sorted({self.path(sample).parent for sample in self.own}):
            store.link_lengths(self.root, folder)
        store.write_json(self.root / "data_config.json", self.data_config())
        self.write_manifest()

    def data_config(self) -> Any:
        """speculators' own configuration; what it asks of a generator is known before there is one."""
        from speculators.data_generation.config_generator import DataGenerationConfig

        options = self.options
        cache = SimpleNamespace(gpu_memory_utilization=options.gpu_memory_utilization)
        generator = SimpleNamespace(
            model_path=options.model_path, tensor_parallel_size=options.tp_size, layer_ids=self.layer_ids,
            vllm_config=SimpleNamespace(cache_config=cache),
        )  # fmt: skip
        config = DataGenerationConfig.from_generator(
            generator=generator, train_data_path=str(options.prepared_data), seq_length=self.limit, cache_dir="",
            num_samples=len(self.prepared.samples), max_samples=options.max_samples, seed=options.seed or 0,
        )  # fmt: skip
        return config.to_dict()

    def write_manifest(self) -> None:
        self.manifest_written = time.monotonic()
        store.write_json(self.manifest_path, self.manifest)


def batches(samples: Sequence[Sample], size: int, window: int) -> Iterator[list[Sample]]:
    """Batches of like lengths, the longest first, so that memory runs out at once or never; numbers stay."""
    by_window: dict[int, list[Sample]] = {}
    for sample in samples:
        by_window.setdefault(sample.number // window, []).append(sample)
    for group in by_window.values():
        group.sort(key=lambda sample: (-len(sample.input_ids), sample.number))
        for begin in range(0, len(group), size):
            yield group[begin : begin + size]
