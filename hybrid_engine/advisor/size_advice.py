"""What is wrong with parallel sizes, one finding for each size, with the values that would do.

    tp=5   breaks a rule for heads, key/value heads and every projection: one finding, "use one of 1, 2, 4, 8"

What a model cannot have comes first; what does not fit the number of ranks is looked at when that is in order, since
another size makes another number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from hybrid_engine.errors import Violation
from hybrid_engine.layouts.parallelism import InferenceParallelism, Parallelism, TrainParallelism
from hybrid_engine.layouts.size_rules import INFER_RULES, TRAIN_RULES, violations
from hybrid_engine.layouts.stages import uneven_ends
from hybrid_engine.models.table import ModelTable

_OnRanks = Callable[[Parallelism], Parallelism]
"""Gives sizes the number of ranks on which they are looked at."""
_MOST_PROBLEMS = 2
_MOST_VALUES = 12


def fewest_ranks(sizes: Parallelism) -> int:
    """The smallest number of ranks that these sizes can share out."""
    if isinstance(sizes, TrainParallelism):
        return math.lcm(sizes.ranks_per_replica, sizes.expert_cut * sizes.expert * sizes.pipeline)
    return math.lcm(sizes.ranks_per_replica, sizes.expert * sizes.pipeline)


def model_findings(sizes: Parallelism, table: ModelTable) -> list[Violation]:
    """What the model cannot have on any number of ranks; keys are the sizes' attributes."""
    return _one_for_each_size(sizes, table, lambda tried: replace(tried, world_size=fewest_ranks(tried)))


def rank_findings(sizes: Parallelism, table: ModelTable) -> list[Violation]:
    """What does not fit the number of ranks, for sizes that the model can have."""
    return _one_for_each_size(sizes, table, lambda tried: tried)


def _one_for_each_size(sizes: Parallelism, table: ModelTable, on_ranks: _OnRanks) -> list[Violation]:
    by_size: dict[str, list[Violation]] = {}
    for finding in violations(on_ranks(sizes), table):
        by_size.setdefault(finding.key, []).append(finding)
    found: list[Violation] = []
    for size, findings in by_size.items():
        found += _joined(sizes, table, size, findings, on_ranks)
    return found


def _joined(
    sizes: Parallelism, table: ModelTable, size: str, findings: Sequence[Violation], on_ranks: _OnRanks
) -> Sequence[Violation]:
    remedy = findings[0].remedy
    if size == "pipeline" and isinstance(sizes, TrainParallelism) and len(findings) == 1:
        ends = uneven_ends(sizes, table.dims.num_layers + len(sizes.noop_layers))
        if ends is not None:
            remedy = f"Try first={ends.first},last={ends.last}, or a divisor of the layers"
        return [replace(findings[0], remedy=remedy)]
    if size != "tensor" and len(findings) == 1:
        return findings
    values = [str(value) for value in _possible(sizes, table, size, on_ranks)]
    if not values:
        return findings
    problems = [finding.problem for finding in findings]
    if len(problems) > _MOST_PROBLEMS + 1:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
    if len(values) > _MOST_VALUES:
        values[_MOST_VALUES - 1 : -1] = ["…"]
    remedy = f"Use one of {', '.join(values)}" if len(values) > 1 else f"Use {values[0]}"
    return [Violation(size, "; ".join(problems), remedy)]


def _possible(sizes: Parallelism, table: ModelTable, size: str, on_ranks: _OnRanks) -> list[int]:
    """Values of a size that break no rule about it, the other sizes being as they are."""
    dims = table.dims
    largest = {"tensor": dims.num_heads, "pipeline": dims.num_layers, "expert": max(dims.num_experts, 1)}
    values: Sequence[int] = range(1, largest.get(size, 0) + 1)
    if size == "tensor":  # cheaply first: a rule about cuts goes through every parameter
        values = [value for value in values if dims.num_heads % value == 0]
    return [value for value in values if not _breaks_a_rule(on_ranks(_with(sizes, size, value)), table, size)]


def _with(sizes: Parallelism, size: str, value: int) -> Parallelism:
    changed = {each.name: getattr(sizes, each.name) for each in fields(sizes)} | {size: value}
    return type(sizes)(**changed)


def _breaks_a_rule(sizes: Parallelism, table: ModelTable, size: str) -> bool:
    if isinstance(sizes, InferenceParallelism):
        return any(found.key == size for infer_rule in INFER_RULES for found in infer_rule.find(sizes, table))
    return any(found.key == size for train_rule in TRAIN_RULES for found in train_rule.find(sizes, table))
