"""Draws docs/performance.svg from results of benchmarks/throughput.py; --table prints them as Markdown.

python benchmarks/plot.py OUT.svg [--results H200.json CPU.json] [--table]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "prefill": "prefill alone",
    "generate": "`generate()`",
    "replies": "`generate()`, rows in the replies",
    "hand": "repaired by hand",
    "transformers": "Transformers `output_hidden_states`",
}


def name_of(label: str) -> str:
    kind, _, rest = label.partition("=")
    folder, _, idle = rest.partition(",")
    where = "memory file system" if folder.startswith("/dev/shm") else "disk"
    if kind == "generate" and idle:
        return f"`generate()`, buffers freed after {idle} calls"
    if kind == "save":
        return f"`generate()`, all saved, {where}" + (f", buffers freed after {idle} calls" if idle else "")
    if kind == "extract":
        return f"`generate()`, all saved as `extract` does, {where}"
    if kind.startswith("disk"):
        return f"saving alone{' as `extract` does' if kind == 'disk-extract' else ''}, {where}"
    return NAMES.get(label, label.replace("extract_hidden_states", "`extract_hidden_states`"))


def table(result: dict[str, Any]) -> str:
    lines = ["| | tokens/s | of prefill | lowest to highest |", "| --- | --- | --- | --- |"]
    for label, side in result["sides"].items():
        ratio = side.get("ratio_to_prefill")
        lines.append(
            f"| {name_of(label)} | {side['tokens_per_second']['median']:,.0f} | "
            + (f"{ratio['median']:.3f} | {ratio['lowest']:.3f} to {ratio['highest']:.3f} |" if ratio else " | |")
        )
    for name, points in result.get("sweeps", {}).items():
        if not any("generate" in point["sides"] for point in points):
            continue
        lines += [
            "",
            f"| {name} | prefill alone, s a call | `generate()`, s a call | of prefill |",
            "| --- | --- | --- | --- |",
        ]
        for point in points:
            seconds = {label: _seconds(side) for label, side in point["sides"].items()}
            ratio = point["sides"].get("generate", {}).get("ratio_to_prefill", {}).get("median")
            cells = [f"{seconds[side]:.3f}" if side in seconds else "" for side in ("prefill", "generate")]
            lines.append(
                f"| {point[name]} | {' | '.join(cells)} | {ratio:.3f} |" if ratio else f"| {point[name]} | | | |"
            )
    return "\n".join(lines)


def _seconds(side: dict[str, Any]) -> float:
    """Seconds of one call: the median over rounds of the mean over a round."""
    each = sorted(one["seconds"] / len(one["calls"]) for one in side["rounds"])
    return float(each[len(each) // 2])


def draw(results: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "performance", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(results),
        4,
        figsize=(14, 3.4 * len(results)),
        layout="constrained",
        squeeze=False,
        width_ratios=[1.6, 1, 1, 1],
    )
    for result, axes in zip(results, rows, strict=True):
        bars, *lines = axes
        sides = {
            label: side for label, side in result["sides"].items() if not label.startswith("disk") and "," not in label
        }
        names = [name_of(label).replace("`", "") for label in sides]
        rates = [side["tokens_per_second"] for side in sides.values()]
        middle = [rate["median"] for rate in rates]
        errors = [
            [rate["median"] - rate["lowest"] for rate in rates],
            [rate["highest"] - rate["median"] for rate in rates],
        ]
        bars.barh(names, middle, xerr=errors, color=["tab:grey" if n == "prefill alone" else "tab:blue" for n in names])
        bars.invert_yaxis()
        bars.set_xlabel("tokens/s")
        ours = result["processes"]["ours"]
        bars.set_title(
            f"{ours['device']}, {result['model']['num_hidden_layers']} layers of {result['model']['hidden_size']}"
        )
        for axis, (name, label) in zip(
            lines,
            (("tokens", "tokens a call"), ("layers", "captured layers"), ("calls", "calls in a row")),
            strict=True,
        ):
            points = result.get("sweeps", {}).get(name, [])
            for side, colour in (("prefill", "tab:grey"), ("generate", "tab:blue")):
                done = [point for point in points if side in point["sides"]]
                axis.plot(
                    [p[name] for p in done],
                    [_seconds(p["sides"][side]) for p in done],
                    marker=".",
                    color=colour,
                    label=side,
                )
            axis.set_xlabel(label)
            axis.set_ylabel("seconds a call")
            axis.set_ylim(bottom=0)
            axis.legend()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--results", type=Path, nargs="+", default=sorted(RESULTS.glob("h200.json")) + sorted(RESULTS.glob("cpu.json"))
    )
    parser.add_argument("--table", action="store_true", help="print tables and draw nothing")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    if options.table:
        for path, result in zip(options.results, results, strict=True):
            print(f"{path.name}\n\n{table(result)}\n")
    else:
        draw(results, options.out)


if __name__ == "__main__":
    main()
