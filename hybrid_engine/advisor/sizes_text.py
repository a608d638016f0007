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
from typing import Any

from hybrid_engine.errors import ConfigError, Violation, clipped, shortened
from hybrid_engine.layouts.inference import InferenceParallelism
from hybrid_engine.layouts.parallelism import LARGEST_SIZE
from hybrid_engine.layouts.training import TrainParallelism
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


_TRAIN_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tp": ("tensor", whole_number),
    "pp": ("pipeline", whole_number),
    "vpp": ("virtual_pipeline", whole_number),
    "cp": ("context", whole_number),
    "dp": ("data", whole_number),
    "ep": ("expert", whole_number),
    "etp": ("expert_tensor", whole_number),
    "first": ("num_layers_in_first_pipeline_stage", whole_number),
    "last": ("num_layers_in_last_pipeline_stage", whole_number),
    "embedding": ("account_for_embedding_in_pipeline_split", _flag),
    "loss": ("account_for_loss_in_pipeline_split", _flag),
    "layout": ("pipeline_layout", str),
    "noop": ("noop_layers", _positions),
    "vocab": ("make_vocab_size_divisible_by", whole_number),
}
_INFER_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tp": ("tensor", whole_number),
    "pp": ("pipeline", whole_number),
    "dp": ("data", whole_number),
    "ep": ("expert", whole_number),
}


def parse_job(
    train: str, infer: str, table: ModelTable | None, world_size: int | None = None
) -> tuple[TrainParallelism, InferenceParallelism]:
    """Both sides' sizes on one number of ranks, in sequential order; without a table only the texts are checked.

    `world_size`: number of ranks where neither side gives dp.

    Raises ConfigError with every violation; keys are those of the texts, e.g. `--train tp`.
    """
    found: list[Violation] = []
    training = _parse(train, TRAIN, _TRAIN_KEYS, found)
    inference = _parse(infer, INFER, _INFER_KEYS, found)
    if found:
        raise ConfigError(found)
    world_size = _world_size(training, inference, world_size, found)
    if world_size > MOST_RANKS:
        found.append(Violation(f"{TRAIN} dp", f"{world_size} ranks", f"Use sizes that make at most {MOST_RANKS}"))
        raise ConfigError(found)
    training.pop("data", None)
    inference.pop("data", None)
    sides = TrainParallelism(world_size, **training), InferenceParallelism(world_size, **inference)
    for side, option, keys in zip(sides, (TRAIN, INFER), (_TRAIN_KEYS, _INFER_KEYS), strict=True):
        if table is None:
            continue
        short = {name: key for key, (name, _) in keys.items()}
        found += [
            Violation(f"{option} {short.get(each.key, 'dp')}", each.problem, each.remedy)
            for each in side.violations(table)
        ]
    if found:
        raise ConfigError(found)
    return sides


def _parse(
    text: str, option: str, keys: Mapping[str, tuple[str, Callable[[str], Any]]], found: list[Violation]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        if key not in keys:
            found.append(Violation(f"{option} {clipped(key)}", "unknown key", f"Known keys: {', '.join(keys)}"))
            continue
        name, read = keys[key]
        try:
            parsed = read(value)
        except (ValueError, KeyError):
            found.append(Violation(f"{option} {key}", f"{shortened(value)} cannot be read", "See --help for examples"))
            continue
        if name in values:
            found.append(Violation(f"{option} {key}", "given twice", "Leave one out"))
        elif isinstance(parsed, int) and not isinstance(parsed, bool) and not 1 <= parsed <= LARGEST_SIZE:
            found.append(Violation(f"{option} {key}", f"{parsed} is not a valid size", f"Use 1 to {LARGEST_SIZE}"))
        values[name] = parsed
    return values


def _world_size(
    training: Mapping[str, int], inference: Mapping[str, int], otherwise: int | None, found: list[Violation]
) -> int:
    """Number of ranks, from the sides that say how many replicas they have."""
    model_ranks = {
        TRAIN: training.get("tensor", 1) * training.get("pipeline", 1) * training.get("context", 1),
        INFER: inference.get("tensor", 1) * inference.get("pipeline", 1),
    }
    worlds = {
        option: model_ranks[option] * sizes["data"]
        for option, sizes in ((TRAIN, training), (INFER, inference))
        if "data" in sizes
    }
    if not worlds and otherwise is not None:
        return otherwise
    if not worlds:
        problem = "neither side says how many replicas there are, so the number of ranks is open"
        found.append(Violation(f"{TRAIN} dp", problem, "Give dp on one side or on both"))
        return max(model_ranks.values())
    if len(set(worlds.values())) > 1:
        problem = f"training has {worlds[TRAIN]} ranks, inference {worlds[INFER]}"
        found.append(Violation(f"{INFER} dp", problem, "They are the same ranks: leave dp out on one side"))
    return worlds.get(TRAIN, worlds.get(INFER, 1))
