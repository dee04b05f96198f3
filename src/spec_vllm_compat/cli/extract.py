"""``extract``: the job itself, for people who do not want to write a script. All that is checked before it starts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from spec_vllm_compat.cli import samples as prepared_data
from spec_vllm_compat.cli.options import ManyValues, layer_ids_option
from spec_vllm_compat.cli.progress import counted, shown
from spec_vllm_compat.cli.samples import Prepared
from spec_vllm_compat.cli.target import read_target
from spec_vllm_compat.errors import CompatError

HELP = f"""Extract hidden states of prepared data into DIR, in the form that speculators' trainer reads.

\b
{prepared_data.FORMATS}

Everything that can be checked is checked before the model loads: the lines of the data, the layers, free disk. Files
appear whole or not at all. Kill it, start it again with the same options: what is there is checked, the rest is filled
in. Ctrl-C finishes the running batch; a second Ctrl-C stops at once.

Several GPUs or hosts: start N of them with --num-shards N --shard-index 0 ... N-1 and the same DIR (a SLURM array,
one a GPU with CUDA_VISIBLE_DEVICES); `verify DIR` looks at all together.

\b
  spec-vllm-compat extract --model-path Qwen/Qwen3-8B --prepared-data tokenized.jsonl --output-dir hidden \\
      --layer-ids 2 18 33 35 --batch-size 16 --max-seq-len 2048
"""


FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
DTYPE = click.Choice(["auto", "bfloat16", "float16", "float32"])
COUNT, NUMBER = click.IntRange(1), click.IntRange(0)


@click.command("extract", help=HELP, short_help="Extract hidden states; resumable.", cls=ManyValues,
               context_settings={"show_default": True})  # fmt: skip
@click.option("--model-path", required=True, metavar="MODEL", help="Folder or hub id of the target model.")
@click.option(
    "--prepared-data", required=True, type=click.Path(path_type=Path), help="JSONL, Parquet, datasets folder."
)
@click.option("--output-dir", required=True, type=FOLDER, metavar="DIR")
@layer_ids_option("Layers to save, in this order. Default: speculators' choice.")
@click.option("--batch-size", default=8, type=COUNT, help="Sequences a call.")
@click.option("--max-seq-len", default=2048, type=COUNT, help="Longer samples are cut.")
@click.option("--tp-size", default=1, type=COUNT, help="GPUs that share the model.")
@click.option("--gpu-memory-utilization", default=0.8, type=click.FloatRange(0, 1, min_open=True))
@click.option("--max-samples", type=COUNT, help="Take so many samples. Default: all.")
@click.option("--seed", type=int, help="Shuffle before numbering and taking. Default: keep the order of the data.")
@click.option("--resume/--no-resume", default=True, help="--no-resume wants a DIR without samples.")
@click.option("--shard-size", default=2000, type=NUMBER, help="Samples a rows_A-B; 0: flat.")
@click.option("--save-dtype", default="auto", type=DTYPE, help="auto is the model's own.")
@click.option("--num-shards", default=1, type=COUNT, help="Split the data for so many jobs.")
@click.option("--shard-index", default=0, type=NUMBER, help="The part that this job does.")
@click.option("--fail-on-error", is_flag=True, help="Stop at the first sample that fails: --max-failures 1.")
@click.option("--skip-bad-lines", is_flag=True, help="Leave out lines that are no samples; their numbers stay free.")
@click.option("--max-failures", default=5, type=COUNT, help="Stop after so many failed samples in a row.")
@click.option("--token-freq-path", type=FILE, help="Also write token frequencies, for a smaller draft vocabulary.")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the model's folder brings.")
def command(**values: Any) -> int:
    options = SimpleNamespace(**values)
    if options.shard_index >= options.num_shards:
        raise click.UsageError(f"--shard-index is 0 to {options.num_shards - 1} with --num-shards {options.num_shards}")
    return extract(options)


def extract(options: SimpleNamespace, build: Callable[..., Any] | None = None) -> int:
    """Run the job that the options of :data:`command` ask for; ``build`` makes the generator. Returns the exit status."""
    target = read_target(options.model_path, trust_remote_code=options.trust_remote_code)
    layer_ids = target.layer_ids(options.layer_ids)
    # vLLM wants room for one more token; speculators takes it from the sample, we add it.
    limit = min(options.max_seq_len, (target.max_length or sys.maxsize) - 1)
    prepared = prepared_data.read(
        options.prepared_data,
        max_length=limit,
        vocab_size=target.vocab_size,
        tokenize=prepared_data.tokenizer_of(options.model_path, limit),
        max_samples=options.max_samples,
        seed=options.seed,
    )
    _say_what_was_read(options, prepared, limit)
    if options.token_freq_path is not None:
        _write_token_frequencies(options.token_freq_path, options.output_dir, prepared)
    from spec_vllm_compat.cli.job import Job, speculators_generator
    from spec_vllm_compat.cli.plan import Plan, manifest_name
    from spec_vllm_compat.cli.store import locked

    options.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(options.output_dir / f".{manifest_name(options)}.lock"):
        return Job(Plan(options, target, layer_ids, limit, prepared)).run(build or speculators_generator)


def _say_what_was_read(options: SimpleNamespace, prepared: Prepared, limit: int) -> None:
    if prepared.bad:
        lines = shown([f"line {line}: {reason}" for line, _, reason in prepared.bad], 10)
        text = "\n  ".join([f"{options.prepared_data}: lines that are no samples ({len(prepared.bad)}):", *lines])
        if not options.skip_bad_lines:
            raise CompatError(f"{text}\nRepair them, or pass --skip-bad-lines. Nothing was started.")
        click.echo(text, err=True)
    if prepared.cut:
        click.echo(f"cut to {limit} tokens: {prepared.cut} of {counted(len(prepared.samples), 'sample')}")
    if not prepared.samples:
        raise CompatError("no usable sample is left")


def _write_token_frequencies(path: Path, output: Path, prepared: Prepared) -> None:
    """What speculators' ``save_token_frequency_distribution`` writes: how often each token is trained on."""
    from spec_vllm_compat.cli.store import write_sample

    if output.resolve() in path.resolve().parents:
        raise CompatError(f"--token-freq-path {path}: the trainer takes every .pt in {output} for a sample")
    counts: Counter[int] = Counter()
    for sample in prepared.samples:
        counts.update(compress(sample.input_ids, sample.loss_mask))
    write_sample(path, dict(counts))
