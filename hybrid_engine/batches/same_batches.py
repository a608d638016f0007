"""Ranks that compute a batch together pass the same, bit by bit: TP and PP ranks each compute a part of its rows.

With global data all ranks do, with local data those of one data parallel rank's model. Most often it is a reward with
randomness in it that differs, and nothing else would show that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_engine.batches.batch_checks import BatchLimits, Data, own_share
from hybrid_engine.batches.sequences import Batch
from hybrid_engine.batches.token_outputs import NO_OUTPUTS, Outputs
from hybrid_engine.errors import BatchError, Violation
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.digests import box_digest, text_digest


@dataclass(frozen=True)
class _Passed:
    """What a rank passes.

    Attributes:
        dp_rank: whose part it computes.
        call: name -> the argument; the same on all ranks, for those that join their results would wait for one that
            keeps its own.
        tensors: name -> shape and type, digest of the bytes.
    """

    dp_rank: int
    call: dict[str, str]
    tensors: dict[str, tuple[str, int]]


def agreed_share(
    batch: Batch,
    limits: BatchLimits,
    agreement: Agreement,
    data: Data = "global",
    outputs: Outputs = NO_OUTPUTS,
    *,
    needs_labels: bool = True,
) -> Batch:
    """As `own_share`, but all ranks raise what one of them finds, before any of them computes. Collective.

    Raises BatchError on all ranks as well where they pass what differs, by name.
    """
    phase = "checking the batch"
    with agreement.phase(phase):
        share = own_share(batch, limits, data, outputs, needs_labels=needs_labels)
        rows = f"shape {list(share['tokens'].shape)}"
        call = {"data": repr(data), "entropy": str(outputs.entropy), "top_k": str(outputs.top_k), "tokens": rows}
        tensors = {
            name: (
                f"shape {list(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}",
                int(box_digest(tensor, tensor.dtype)),
            )
            for name, tensor in sorted(batch.items())
        }
    own = text_digest(repr(tensors))
    by_part = [own if data == "global" or part == limits.dp_rank else None for part in range(limits.dp_size)]
    if not agreement.is_same([text_digest(repr(call)), *by_part], phase):
        passed: list[_Passed] = agreement.gather(_Passed(limits.dp_rank, call, tensors), phase)
        raise BatchError(list(_differences(passed)))
    return share


def _differences(passed: Sequence[_Passed]) -> Iterator[Violation]:
    """Of each name the first two ranks that differ; the same on all ranks."""
    remedy = 'Pass the same, and as many rows and columns, on every rank; data="local" is for parts of their own'
    for name, first in passed[0].call.items():
        for rank, other in enumerate(passed):
            if other.call[name] != first:
                yield Violation(name, f"{first} on rank 0, {other.call[name]} on rank {rank}", remedy)
                break
    if any(each.call != passed[0].call for each in passed):
        return
    is_global = passed[0].call["data"] == repr("global")
    remedy = "Make it on one rank and broadcast it, or make it of the same numbers in the same order"
    for name in sorted({name for each in passed for name in each.tensors}):
        first_of: dict[int, int] = {}
        for rank, each in enumerate(passed):
            first_rank = first_of.setdefault(0 if is_global else each.dp_rank, rank)
            here, there = passed[first_rank].tensors.get(name), each.tensors.get(name)
            if here != there:
                yield Violation(name, _difference(here, there, first_rank, rank), remedy)
                break


def _difference(here: tuple[str, int] | None, there: tuple[str, int] | None, first: int, other: int) -> str:
    if here is None or there is None:
        return (
            f"is missing on rank {first if here is None else other}, and not on rank {other if here is None else first}"
        )
    if here[0] != there[0]:
        return f"has {here[0]} on rank {first}, {there[0]} on rank {other}"
    return f"has other values on rank {other} than on rank {first}, and they compute it together"
