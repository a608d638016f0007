"""Parallel sizes as text: `tp=8,pp=2,dp=4`.

training     tp pp vpp cp dp ep etp     sizes; dp is checked, or taken from the other side's number of ranks
             first last                 layers of the first and last pipeline stage
             embedding=1 loss=1         count embedding, head as a layer in the split
             layout=Et*2|t|tL           megatron-core's notation of every stage, without commas
             noop=3:7                   positions of no-op layers
             vocab=128                  make_vocab_size_divisible_by
inference    tp pp dp ep
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.errors import ConfigError, Violation, clipped, shortened
from hybrid_engine.layouts.parallelism import (
    LARGEST_SIZE,
    InferenceParallelism,
    Parallelism,
    Size,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models.table import ModelTable

TRAIN, INFER = "--train", "--infer"
MOST_RANKS = 2**17
"""Beyond these a plan would take minutes, and more memory than it tells of."""


def whole_number(text: str) -> int:
    """Of the digits 0 to 9 alone: Python also reads `1_0` and other scripts' digits. Raises ValueError."""
    if not re.fullmatch("[0-9]{1,30}", text):
        raise ValueError(f"{shortened(text)} is not a whole number")
    return int(text)


def _positions(text: str) -> tuple[int, ...]:
    return tuple(whole_number(number) for number in text.split(":"))


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


_READERS: Mapping[type, Callable[[str], Any]] = {int: whole_number, bool: _flag, str: str, tuple: _positions}
_DATA = Size("", "dp", name="data")
"""No size of its own: together with the others it says how many ranks there are."""


def _by_text(side: type[Parallelism]) -> dict[str, Size]:
    return {size.text: size for size in (*sizes_of(side), _DATA)}


def parse_job(
    train: str, infer: str, table: ModelTable | None, world_size: int | None = None
) -> tuple[TrainParallelism, InferenceParallelism]:
    """Both sides' sizes on one number of ranks, in sequential order; without a table only the texts are checked.

    `world_size`: number of ranks where neither side gives dp.

    Raises ConfigError with every violation; keys are those of the texts, e.g. `--train tp`.
    """
    found: list[Violation] = []
    training = _parse(train, TRAIN, TrainParallelism, found)
    inference = _parse(infer, INFER, InferenceParallelism, found)
    if found:
        raise ConfigError(found)
    dps = {TRAIN: training.pop(_DATA.name, None), INFER: inference.pop(_DATA.name, None)}
    one_rank = TrainParallelism(1, **training), InferenceParallelism(1, **inference)
    ranks_per_replica = {TRAIN: one_rank[0].ranks_per_replica, INFER: one_rank[1].ranks_per_replica}
    worlds = {option: ranks_per_replica[option] * dp for option, dp in dps.items() if dp is not None}
    world_size = _world_size(worlds, world_size, found) or max(ranks_per_replica.values())
    if world_size > MOST_RANKS:
        found.append(Violation(f"{TRAIN} dp", f"{world_size} ranks", f"Use sizes that make at most {MOST_RANKS}"))
        raise ConfigError(found)
    sides = replace(one_rank[0], world_size=world_size), replace(one_rank[1], world_size=world_size)
    options: tuple[tuple[Parallelism, str], ...] = ((sides[0], TRAIN), (sides[1], INFER))
    for sizes, option in options:
        texts = {size.name: size.text for size in sizes_of(type(sizes))}
        for each in [] if table is None else violations(sizes, table):
            found.append(Violation(f"{option} {texts.get(each.key, _DATA.text)}", each.problem, each.remedy))
    if found:
        raise ConfigError(found)
    return sides


def _parse(text: str, option: str, side: type[Parallelism], found: list[Violation]) -> dict[str, Any]:
    """The values of a text by attribute."""
    values: dict[str, Any] = {}
    sizes = _by_text(side)
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        if key not in sizes:
            found.append(Violation(f"{option} {clipped(key)}", "unknown key", f"Known keys: {', '.join(sizes)}"))
            continue
        size = sizes[key]
        try:
            parsed = _READERS[size.type](value)
        except (ValueError, KeyError):
            found.append(Violation(f"{option} {key}", f"{shortened(value)} cannot be read", "See --help for examples"))
            continue
        if size.name in values:
            found.append(Violation(f"{option} {key}", "given twice", "Leave one out"))
        elif isinstance(parsed, int) and not isinstance(parsed, bool) and not 1 <= parsed <= LARGEST_SIZE:
            found.append(Violation(f"{option} {key}", f"{parsed} is not a valid size", f"Use 1 to {LARGEST_SIZE}"))
        values[size.name] = parsed
    return values


def _world_size(worlds: Mapping[str, int], otherwise: int | None, found: list[Violation]) -> int | None:
    """Number of ranks, from the sides that say how many replicas they have; None where it stays open."""
    if not worlds and otherwise is None:
        problem = "neither side says how many replicas there are, so the number of ranks is unknown"
        found.append(Violation(f"{TRAIN} dp", problem, "Give dp on one side or on both"))
    if len(set(worlds.values())) > 1:
        problem = f"training has {worlds[TRAIN]} ranks, inference {worlds[INFER]}"
        found.append(Violation(f"{INFER} dp", problem, "They are the same ranks: leave dp out on one side"))
    return next(iter(worlds.values()), otherwise)
