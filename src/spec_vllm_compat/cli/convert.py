"""``convert``: samples of speculators 0.3 and 0.4 to what 0.5 and newer read (``ArrowDataset``), and back.

::

    data_N.pt, rows_A-B/data_N.pt    input_ids, loss_mask, hidden_states: one tensor [tokens, hidden_size] a layer
    hidden_states/hs_I.safetensors   token_ids [tokens], hidden_states [tokens, layers, hidden_size]
      and a data set beside them     input_ids, loss_mask, seq_len in row I
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import counted, human
from spec_vllm_compat.errors import CompatError
from spec_vllm_compat.layer_ids import layer_numbering

RECORD = "conversion.json"
_NAME = re.compile(r"((?!\.\.?/)[\w.=-]+/)*data_\d+\.pt|[\w-]+\.json")  # no way out of TARGET
HELP = """Turn SOURCE into TARGET: data_N.pt of speculators 0.3 and 0.4 into what 0.5 and newer read, or the other way.

SOURCE, which is only read, decides the way. Values, dtypes and the order of layers stay; every file is read again and
compared. The two sides count layers differently: the output says which ids to pass on. TARGET appears when all is done;
until then it is TARGET.part, where the same command goes on after an interruption.
"""

#: What is to be done once all of SOURCE was found sound: (index, file of SOURCE, its name in TARGET); the record that
#: TARGET keeps for the way back; writes one file and says whether it reads as written; writes what lies beside them.
Plan = tuple[list[tuple[int, Path, str]], dict[str, Any], Callable[[int, Path, Path], bool], Callable[[Path], None]]


@click.command("convert", help=HELP, short_help="To the format of speculators 0.5, and back.", cls=ManyValues)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@layer_ids_option("The layers of SOURCE as its side counts them, the last one too; needed where SOURCE does not say.")
def command(source: Path, target: Path, layer_ids: tuple[int, ...]) -> int:
    from spec_vllm_compat.cli.store import find_samples, newer_samples, read_json, write_json

    old, strays = find_samples(source)
    new = newer_samples(source)
    if bool(old) == bool(new):
        found = "both" if old else "neither"
        raise CompatError(f"{source}: expected data_N.pt or hidden_states/hs_I.safetensors; found {found}")
    if old and (odd := strays + [path for paths in old.values() for path in paths[1:]]):
        raise CompatError(f"{source}: expected one data_N.pt a sample and no other .pt; found {odd[0]} too")
    part = target.with_name(f"{target.name}.part")
    if target.exists() or source.resolve() in part.resolve().parents:
        raise CompatError(f"{target}: expected a folder that is not there yet, outside of {source}")
    files = [paths[0] for paths in old.values()]
    if holes := sorted(set(range(max(old, default=-1) + 1)) - set(old)):
        text = f"{source} has {counted(len(old), 'sample')} and no number {holes[0]} ({len(holes)} missing)"
        click.echo(f"warning: {text}", err=True)
    plan = _to_new(source, files, layer_ids) if old else _to_old(source, new, layer_ids)
    pairs, record, convert, finish = plan
    if read_json(part / RECORD) not in (None, record):
        raise CompatError(f"{part}: expected this conversion, begun; found another one. Remove that folder.")
    left = [(index, path, part / name) for index, path, name in pairs if not (part / name).exists()]
    part.mkdir(parents=True, exist_ok=True)
    size, free = sum(path.stat().st_size for _, path, _ in left), shutil.disk_usage(part).free
    if size > free:
        raise CompatError(f"{part}: expected {human(size)} of free disk; found {human(free)}. Nothing was started.")
    write_json(part / RECORD, record)
    with click.progressbar(left, file=sys.stderr) as bar:
        for index, path, to in bar:
            if not convert(index, path, to):
                to.unlink()
                raise CompatError(f"{to}: was read otherwise than it was written. Is the disk sound?")
    finish(part)
    os.replace(part, target)
    click.echo(f"complete: {counted(len(pairs), 'sample')}, {target}\n{layer_numbering(record['layer_ids'])}")
    *inputs, last = map(str, record["target_layer_ids"])
    if max(record["layer_ids"]) != record["layer_ids"][-1]:
        click.echo("warning: the last layer is not the highest. Trainers take it for the model's last block.", err=True)
        return 0
    click.echo(f"speculators 0.5 and newer: --target-layer-ids {' '.join(inputs)}, and a model of {last} blocks")
    return 0


def _layers(source: Path, said: Sequence[int] | None, given: Sequence[int], tensors: int, shift: int) -> dict[str, Any]:
    """Both numberings of the layers; ``shift`` is 1 where SOURCE counts as vLLM does."""
    ids = list(given or said or ())
    if len(ids) != tensors or (said and ids != list(said)):
        hint = f"It says {said}." if said else "Pass --layer-ids."
        raise CompatError(f"{source}: expected the ids of its {tensors} layers; found {ids}. {hint}")
    both = layer_numbering([layer - shift for layer in ids])
    return {"layer_ids": list(both.speculators), "target_layer_ids": list(both.vllm)}


def _to_new(source: Path, files: list[Path], given: Sequence[int]) -> Plan:
    import datasets
    import torch
    from safetensors.torch import load_file, save_file

    from spec_vllm_compat.cli.store import publish, read_json, sound_sample

    states = sound_sample(files[0])["hidden_states"]
    dtype = str(states[0].dtype).removeprefix("torch.")
    like = {"layers": len(states), "hidden_size": states[0].shape[1], "dtype": dtype}
    for path in files:
        sound_sample(path, **like)
    beside = {path.name: read_json(path) for path in sorted(source.glob("*.json"))}
    config = beside.get("data_config.json")
    record = {"files": [str(path.relative_to(source)) for path in files], "beside": beside}
    record |= _layers(source, config and config["hidden_states"]["layer_ids"], given, len(states), 0)

    def convert(_index: int, path: Path, to: Path) -> bool:
        sample = sound_sample(path, **like, values=True)
        tensors = {"token_ids": sample["input_ids"], "hidden_states": torch.stack(sample["hidden_states"], dim=1)}
        publish(to, lambda part: save_file(tensors, part))
        back = load_file(to)
        return all(back[name].dtype == value.dtype and back[name].equal(value) for name, value in tensors.items())

    def rows() -> Iterator[dict[str, Any]]:
        for path in files:
            sample = torch.load(path, weights_only=True, mmap=True)
            ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
            yield {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}

    def finish(part: Path) -> None:
        with tempfile.TemporaryDirectory(dir=part) as cache:
            datasets.Dataset.from_generator(rows, cache_dir=cache).with_format("torch").save_to_disk(str(part))

    pairs = [(index, path, f"hidden_states/hs_{index}.safetensors") for index, path in enumerate(files)]
    return pairs, record, convert, finish


def _to_old(source: Path, new: dict[int, Path], given: Sequence[int]) -> Plan:
    import torch
    from datasets import load_from_disk
    from safetensors import safe_open
    from safetensors.torch import load_file

    from spec_vllm_compat.cli.store import link_lengths, read_json, write_json, write_sample

    data = load_from_disk(str(source)).with_format("torch")
    before = read_json(source / RECORD) or {"files": [f"data_{index}.pt" for index in range(len(data))], "beside": {}}
    if odd := [name for name in [*before["files"], *before["beside"]] if not _NAME.fullmatch(name)]:
        raise CompatError(f"{source / RECORD}: expected names of samples and JSON files; found {odd[0]!r}")
    pairs, lengths, layers = [], {}, None
    for index, path in sorted(new.items()):
        with safe_open(path, framework="pt") as file:
            shape, ids = file.get_slice("hidden_states").get_shape(), file.get_tensor("token_ids")
        layers = layers or shape[1]
        known = index < min(len(data), len(before["files"])) and ids.equal(data[index]["input_ids"])
        if not known or len(shape) != 3 or shape[:2] != [len(ids), layers]:
            raise CompatError(f"{path}: expected hidden_states [{len(ids)}, {layers}, hidden_size] and the tokens of example "
                              f"{index} of the data set in {source}; found shape {shape}, or other tokens")  # fmt: skip
        pairs.append((index, path, name := before["files"][index]))
        lengths[Path(name).stem.removeprefix("data_")] = len(ids)
    record = before | _layers(source, before.get("target_layer_ids"), given, layers or 0, 1)

    def convert(index: int, path: Path, to: Path) -> bool:
        ids, rows = map(load_file(path).get, ("token_ids", "hidden_states"))
        states = [layer.clone() for layer in rows.unbind(1)]  # torch.save writes the whole storage of a view
        write_sample(to, {"input_ids": ids, "hidden_states": states, "loss_mask": data[index]["loss_mask"]})
        return bool(torch.stack(torch.load(to, weights_only=True)["hidden_states"], dim=1).equal(rows))

    def finish(part: Path) -> None:
        for name, value in ({"sample_lengths.json": lengths} | before["beside"]).items():
            write_json(part / name, value)
        for folder in {(part / name).parent for _, _, name in pairs}:
            link_lengths(part, folder)

    return pairs, record, convert, finish
