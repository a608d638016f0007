"""Parallel sizes as text: `tp=8,pp=2,dp=4`.

training     tp pp vpp cp dp ep etp     sizes; etp is tp unless given, dp what the other side's number of ranks makes
             first last                 layers of the first and last pipeline stage
             embedding=1 loss=1         count embedding, head as a layer in the split
             layout=Et*2|t|tL           megatron-core's notation of every stage, without commas
             noop=3:7                   positions of no-op layers
             hybrid=*-*-|*E*E           pattern of a HybridModel
             vocab=128                  make_vocab_size_divisible_by
or, with FSDP2
             fsdp                       ranks that shard every parameter
             replicas                   groups of so many ranks; 1 unless given
inference    tp pp dp ep

Where neither side gives dp there are as few ranks as both can share out: one replica of the larger, of the other as
many as fill them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybrid_engine.advisor.size_advice import fewest_ranks, model_findings, rank_findings
from hybrid_engine.errors import ConfigError, Violation, clipped, shortened
from hybrid_engine.layouts.parallelism import (
    LARGEST_SIZE,
    InferenceParallelism,
    Parallelism,
    ShardedParallelism,
    Size,
    TrainParallelism,
    sizes_of,
)
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
_SHARDED = {size.text: size for size in (Size("", "fsdp", name="num_shards"), Size("", "replicas", name="data"))}
"""Of a training side that FSDP2 shards."""


def _by_text(side: type[Parallelism]) -> dict[str, Size]:
    return {size.text: size for size in (*sizes_of(side), _DATA)}


def is_sharded(train: str) -> bool:
    """Whether a text of training sizes has any of FSDP2's."""
    return any(key in _SHARDED for key, _ in _parts(train))


def parse_job(
    train: str, infer: str, table: ModelTable | None, world_size: int | None = None
) -> tuple[TrainParallelism | ShardedParallelism, InferenceParallelism]:
    """Both sides' sizes on one number of ranks, in sequential order; without a table only the texts are checked.

    `world_size`: number of ranks where neither side gives dp; default: as few as both can share out.

    Raises ConfigError with every violation; keys are those of the texts, e.g. `--train tp`.
    """
    found: list[Violation] = []
    with_fsdp = is_sharded(train)
    training = _parse(train, TRAIN, _SHARDED if with_fsdp else _by_text(TrainParallelism), found)
    inference = _parse(infer, INFER, _by_text(InferenceParallelism), found)
    if with_fsdp and not found and "num_shards" not in training:
        found.append(Violation(f"{TRAIN} fsdp", "not given", "Say how many ranks shard a parameter, e.g. fsdp=4"))
    if found and "num_shards" not in training and with_fsdp:
        raise ConfigError(found)
    dps = {TRAIN: training.pop(_DATA.name, 1 if with_fsdp else None), INFER: inference.pop(_DATA.name, None)}
    one = _one_replica(training), InferenceParallelism(1, **inference)
    if found:  # what could be read may be wrong, too
        raise ConfigError([*found, *(_findings(one, table, model_findings) if table is not None else ())])
    worlds = {
        option: sizes.ranks_per_replica * dp
        for (option, dp), sizes in zip(dps.items(), one, strict=True)
        if dp is not None
    }
    world_size = _world_size(worlds, found) or world_size or math.lcm(*map(_fewest_ranks, one))
    if world_size > MOST_RANKS:
        found.append(Violation(f"{TRAIN} dp", f"{world_size} ranks", f"Use sizes that make at most {MOST_RANKS}"))
        raise ConfigError(found)
    sides = _on_ranks(one[0], world_size), replace(one[1], world_size=world_size)
    if table is not None:
        found += _findings(sides, table, model_findings) or _findings(sides, table, rank_findings)
    if found:
        raise ConfigError(found)
    return sides


def _fewest_ranks(sizes: TrainParallelism | ShardedParallelism | InferenceParallelism) -> int:
    return sizes.world_size if isinstance(sizes, ShardedParallelism) else fewest_ranks(sizes)


def _findings(
    sides: tuple[TrainParallelism | ShardedParallelism, InferenceParallelism],
    table: ModelTable,
    find: Callable[[Parallelism, ModelTable], Sequence[Violation]],
) -> list[Violation]:
    """Of both sides, under the keys of their texts. What FSDP2 shards has no rules."""
    found = []
    for sizes, option in zip(sides, (TRAIN, INFER), strict=True):
        if not isinstance(sizes, ShardedParallelism):
            texts = {size.name: size.text for size in sizes_of(type(sizes))}
            found += [
                replace(finding, key=f"{option} {texts.get(finding.key, _DATA.text)}") for finding in find(sizes, table)
            ]
    return found


def _one_replica(values: Mapping[str, Any]) -> TrainParallelism | ShardedParallelism:
    """Training sizes whose `ranks_per_replica` holds; their number of ranks does not."""
    return ShardedParallelism(values["num_shards"]) if "num_shards" in values else TrainParallelism(1, **values)


def _on_ranks(sizes: TrainParallelism | ShardedParallelism, world_size: int) -> TrainParallelism | ShardedParallelism:
    if isinstance(sizes, ShardedParallelism):
        return ShardedParallelism(world_size, world_size // sizes.ranks_per_replica)
    return replace(sizes, world_size=world_size)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Keys and values, unread."""
    for part in filter(None, map(str.strip, text.split(","))):
        key, _, value = part.partition("=")
        yield key.strip(), value.strip()


def _parse(text: str, option: str, sizes: Mapping[str, Size], found: list[Violation]) -> dict[str, Any]:
    """The values of a text by attribute."""
    values: dict[str, Any] = {}
    for key, value in _parts(text):
        if key not in sizes:
            found.append(Violation(f"{option} {clipped(key)}", *_unknown(key, option, sizes)))
            continue
        size = sizes[key]
        try:
            parsed = _READERS[size.type](value.replace(" ", ""))
        except (ValueError, KeyError):
            remedy = "See --help for examples"
            if "=" in value:
                remedy = (
                    f"Separate sizes by commas: {clipped(re.sub('[, ]+', ',', re.sub(' *= *', '=', text.strip())))}"
                )
            found.append(Violation(f"{option} {key}", f"{shortened(value)} cannot be read", remedy))
            continue
        if size.name in values:
            found.append(Violation(f"{option} {key}", "given twice", "Leave one out"))
        elif isinstance(parsed, int) and not isinstance(parsed, bool) and not 1 <= parsed <= LARGEST_SIZE:
            found.append(Violation(f"{option} {key}", f"{parsed} is not a valid size", f"Use 1 to {LARGEST_SIZE}"))
            continue
        values[size.name] = parsed
    return values


def _unknown(key: str, option: str, sizes: Mapping[str, Size]) -> tuple[str, str]:
    """What is wrong with a key, and what to do about it."""
    known = f"Known keys: {', '.join(sizes)}"
    if option == INFER:
        return "unknown key", known
    if sizes is _SHARDED and key in _by_text(TrainParallelism):
        return "Megatron's, but with fsdp or replicas FSDP2 trains", f"{known}. Leave out these or those"
    return "unknown key", known if sizes is _SHARDED else f"{known}; or {', '.join(_SHARDED)}"


def _world_size(worlds: Mapping[str, int], found: list[Violation]) -> int | None:
    """Number of ranks, from the sides that say how many replicas they have; None where neither does."""
    if len(set(worlds.values())) > 1:
        problem = f"training has {worlds[TRAIN]} ranks, inference {worlds[INFER]}"
        found.append(Violation(f"{INFER} dp", problem, "They are the same ranks: leave dp out on one side"))
    return next(iter(worlds.values()), None)
