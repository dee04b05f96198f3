"""Damage that speculators without us is known to do, recognised in what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_vllm_compat.cli.progress import counted

AGAIN = "Extract all of it again."


def chunk_loss(lost: int) -> str:
    return (
        f"{counted(lost, 'row')} missing at the end of batches: a prompt was split over two scheduler steps, its rest thrown "
        "away (speculators 0.3), or the KV cache was too small (0.4). In the same generate() call, samples before these "
        f"carry rows of other samples, every shape right. {AGAIN}"
    )


def string_order(batch: int, total: int, number: int) -> int:
    """The sample that speculators 0.4 puts at place ``number`` when it sorts the request ids of a batch as strings."""
    first = number - number % batch
    return first + sorted(range(min(batch, total - first)), key=str)[number - first]


def string_order_by_lengths(lengths: Sequence[tuple[int, int, int]]) -> str | None:
    """Whether string order explains every length of tokens and mask.

    Place j of a batch holds the tokens of sample p(j), and the mask of sample j cut to that many. ``lengths`` are number,
    tokens and mask of each file.
    """
    tokens = {number: count for number, count, _ in lengths}
    masks = {number: count for number, _, count in lengths}
    if tokens == masks or not tokens:
        return None
    total = max(tokens) + 1
    for batch in range(11, min(total, 512) + 1):
        true = {string_order(batch, total, place): count for place, count in tokens.items()}
        if all(number not in true or masks[number] == min(true[number], tokens[number]) for number in masks):
            return (
                f"masks and tokens are paired as if each batch of {batch} came back in string order of its request ids "
                "(0, 1, 10, 11, ..., 2): speculators 0.4. Tokens and rows fit each other, the masks belong to other "
                f"samples, also where their lengths agree. {AGAIN}"
            )
    return None


def string_order_by_places(places: Mapping[int, int], total: int) -> str | None:
    """Whether string order explains where samples stand; ``places`` is file number to number in the data."""
    for batch in range(11, 513):
        if all(string_order(batch, total, number) == place for number, place in places.items()):
            return (
                f"samples stand in the string order of their request ids, in batches of {batch} (speculators 0.4). "
                f"Their masks belong to other samples. {AGAIN}"
            )
    return None


def layers_dropped(asked: Sequence[int], found: set[int]) -> str | None:
    if len(set(asked)) < len(asked) and found == {len(set(asked))}:
        return f"layers {list(asked)} were asked for; speculators drops repetitions and sorts the rest"
    return None
