"""Ranks that compute rows together pass the same, bit by bit: TP and PP ranks each compute a part of them. All ranks
take a step with the same learning rate, or replicas of a weight would part.

Of global data all ranks pass the same token ids and masks, too, though each data parallel rank computes its rows alone:
results are joined. Most often it is a reward with randomness in it that differs, and nothing else would show that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.ports import Batch, Data
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.digests import box_digest, text_digest
from hybrid_engine.trainer.batches.batch_checks import BatchLimits, own_share
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs

Contents = dict[str, tuple[str, int]]
"""Name of a tensor -> its shape and type, and the digest of its bytes."""


@dataclass(frozen=True)
class _Passed:
    """What a rank passes.

    Attributes:
        dp_rank: whose part it computes.
        call: name -> the argument; the same on all ranks, for those that join their results would wait for one that
            keeps its own.
        whole: of tensors in which all ranks pass the same.
        share: of this part of the other tensors.
        learning_rate: of the step; NaN where there is none, or nothing that this rank trains.
    """

    dp_rank: int
    call: dict[str, str]
    whole: Contents
    share: Contents
    learning_rate: float


def agreed_share(
    batch: Batch,
    limits: BatchLimits,
    agreement: Agreement,
    call: str,
    data: Data = "global",
    outputs: Outputs = NO_OUTPUTS,
    *,
    needs_labels: bool = True,
    learning_rate: float = math.nan,
) -> Batch:
    """As `own_share`, but all ranks raise what one of them finds, before any of them computes. Collective.

    `call`: what it is for, in messages. `learning_rate`: of the step that follows; NaN for none.

    Raises BatchError on all ranks as well where they pass what differs, by name, and StateError where they make
    different calls.
    """
    phase = f"checking the batch for: {call}"
    with agreement.phase(phase):
        share = own_share(batch, limits, data, outputs, needs_labels=needs_labels)
        exact = {name: tensor for name, tensor in batch.items() if data == "global" and _is_exact(tensor)}
        others = {name: tensor for name, tensor in share.items() if name not in exact}
        passed = _Passed(
            limits.dp_rank,
            call={
                "data": repr(data),
                "entropy": str(bool(outputs.entropy)),
                "top_k": str(outputs.top_k),
                "tokens": f"shape {list(share['tokens'].shape)}",
            },
            whole=_contents(exact, agreement.world_size > 1),
            share=_contents(others, limits.dp_size < agreement.world_size),
            learning_rate=learning_rate,
        )
    of_share: list[int | None] = [None] * limits.dp_size
    of_share[limits.dp_rank] = text_digest(repr(passed.share))
    of_all = [text_digest(repr(passed.call)), text_digest(repr(passed.whole))]
    rate = None if math.isnan(learning_rate) else text_digest(repr(learning_rate))
    if not agreement.is_same([*of_all, rate, *of_share], phase):
        raise BatchError(list(_differences(agreement.gather(passed, phase))))
    return share


def _is_exact(tensor: torch.Tensor) -> bool:
    """What is computed on each rank by itself has the same bits everywhere only if it has no rounding."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _contents(tensors: Batch, is_compared: bool) -> Contents:
    """Those of no tensor where nobody is there to compare them with."""
    if not (tensors and is_compared):
        return {}
    return {
        name: (
            f"shape {list(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}",
            box_digest(tensor),
        )
        for name, tensor in sorted(tensors.items())
    }


def _differences(passed: Sequence[_Passed]) -> Iterator[Violation]:
    """Of each name the first two ranks that differ; the same on all ranks."""
    rates = {rank: each.learning_rate for rank, each in enumerate(passed) if not math.isnan(each.learning_rate)}
    first, rate = next(iter(rates.items()), (0, math.nan))
    if differing := [rank for rank in rates if rates[rank] != rate]:
        problem = f"{rate} on rank {first}, {rates[differing[0]]} on rank {differing[0]}"
        yield Violation("learning_rate", problem, "Call set_learning_rate with the same on every rank")
    remedy = 'Pass the same, and as many rows and columns, on every rank; data="local" is for parts of their own'
    for name, argument in passed[0].call.items():
        for rank, other in enumerate(passed):
            if other.call[name] != argument:
                yield Violation(name, f"{argument} on rank 0, {other.call[name]} on rank {rank}", remedy)
                break
    if any(each.call != passed[0].call for each in passed):
        return
    remedy = "Compute it on one rank and broadcast it; it must be the same bit for bit"
    found: dict[str, str] = {}
    firsts: dict[int, int] = {}  # of each part, who computes it together
    for rank, each in enumerate(passed):
        first_of_part = firsts.setdefault(each.dp_rank, rank)
        compared = ((0, passed[0].whole, each.whole), (first_of_part, passed[first_of_part].share, each.share))
        for first, here, there in compared:
            for name in sorted(here.keys() | there.keys()):
                if name not in found and here.get(name) != there.get(name):
                    found[name] = _difference(here.get(name), there.get(name), first, rank)
    yield from (Violation(name, problem, remedy) for name, problem in sorted(found.items()))


def _difference(here: tuple[str, int] | None, there: tuple[str, int] | None, first: int, other: int) -> str:
    if here is None or there is None:
        lacks, has = (first, other) if here is None else (other, first)
        return f"is missing on rank {lacks}, and not on rank {has}"
    if here[0] != there[0]:
        return f"has {here[0]} on rank {first}, {there[0]} on rank {other}"
    return f"has other values on rank {other} than on rank {first}; both must pass the same"
