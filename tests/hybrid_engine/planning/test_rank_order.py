"""Orders of ranks: never worse than sequential, best on one host, within HybridFlow's bound."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hybrid_engine.errors import DependencyError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import wire_dtype
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import summarize
from hybrid_engine.records.holdings import Holdings
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.regions import subtract_all, union
from tests.harness.errors import refused
from tests.hybrid_engine.layouts.cases import DENSE, JOBS, LayoutCase, layout_cases


def order_of(case: LayoutCase) -> tuple[int, ...]:
    return rank_order("auto", case.source, case.positions, case.hosts, case.infer.tensor)


def held_nbytes(source: Holdings, positions: Holdings, order: Sequence[int]) -> int:
    """Return the bytes that ranks in this order already hold of their positions' needs."""
    total = 0
    for name, needed in positions.owners.items():
        itemsize = DTYPE_NBYTES[wire_dtype(source.dtypes[name], positions.dtypes[name])]
        for position, rank in enumerate(order):
            wanted = union(box.region for box in needed if position in box.ranks)
            missing = subtract_all(
                wanted, [box.region for box in source.owners[name] if rank in box.ranks]
            )
            total += (
                sum(box.numel for box in wanted) - sum(box.numel for box in missing)
            ) * itemsize
    return total


@JOBS
@given(layout_cases())
def test_ranks_hold_at_least_as_much_as_in_sequential_order(case: LayoutCase) -> None:
    best = order_of(case)
    sequential = tuple(range(len(case.hosts)))
    assert sorted(best) == list(sequential)
    source = case.source
    held = {order: held_nbytes(source, case.positions, order) for order in (best, sequential)}
    assert held[best] >= held[sequential]
    if held[best] == held[sequential]:
        assert best == sequential, "a tie must keep the sequential order"
    for order, nbytes in held.items():
        destination = inference_side(case.table, replace(case.infer, rank_order=order))
        assert summarize(source, destination, case.hosts).own.sum() == nbytes


@JOBS
@given(layout_cases())
def test_tensor_parallel_groups_stay_on_a_host(case: LayoutCase) -> None:
    hosts = np.array(case.hosts)
    before = hosts.reshape(-1, case.infer.tensor)
    after = hosts[list(order_of(case))].reshape(-1, case.infer.tensor)
    together = (before == before[:, :1]).all(axis=1)
    assert (after == after[:, :1]).all(axis=1)[together].all()


@JOBS
@given(layout_cases())
def test_the_order_on_one_host_is_the_best(case: LayoutCase) -> None:
    if len(case.hosts) > 4:  # too many orders
        return
    case = replace(case, hosts=(0,) * len(case.hosts))
    sides = (case.source, case.positions)
    all_orders = itertools.permutations(range(len(case.hosts)))
    assert held_nbytes(*sides, order_of(case)) == max(
        held_nbytes(*sides, order) for order in all_orders
    )


def layers_of(holdings: Holdings) -> Holdings:
    """Keep only the matrices of layers, which are cut over both tensor and pipeline ranks."""
    kept = {name: placed for name, placed in holdings.placed.items() if "_proj." in name}
    return replace(holdings, placed=kept)


NESTED = [
    # training TP, PP; inference TP, PP; number of ranks; ranks per host
    ((6, 1), (2, 1), 6, 6),
    ((4, 2), (2, 1), 8, 8),
    ((4, 2), (2, 2), 16, 8),
    ((2, 2), (1, 1), 8, 4),
    ((6, 2), (3, 2), 24, 12),
    ((4, 2), (2, 2), 16, 4),  # one stage per host
    ((4, 4), (2, 2), 32, 8),
    ((2, 4), (2, 2), 16, 4),
]


@pytest.mark.parametrize(("train", "infer", "num_ranks", "per_host"), NESTED)
def test_nested_shards_meet_the_bound(
    train: tuple[int, int], infer: tuple[int, int], num_ranks: int, per_host: int
) -> None:
    """Every rank receives M * (1 / (tg * pg) - 1 / (t * p)), as in HybridFlow
    (arXiv:2409.19256)."""
    table = table_for(DENSE)
    source = layers_of(training_side(table, TrainParallelism(num_ranks, *train)))
    infer_sizes = InferenceParallelism(num_ranks, *infer)
    positions = layers_of(inference_side(table, infer_sizes))
    hosts = [rank // per_host for rank in range(num_ranks)]
    order = rank_order("auto", source, positions, hosts, infer[0])
    destination = layers_of(inference_side(table, replace(infer_sizes, rank_order=order)))
    model = 2 * sum(int(np.prod(shape)) for name, shape in table.shapes.items() if "_proj." in name)
    bound = model // (infer[0] * infer[1]) - model // (train[0] * train[1])
    assert summarize(source, destination, hosts).received.tolist() == [bound] * num_ranks


def test_sequential_order_keeps_the_ranks() -> None:
    holdings = training_side(table_for(DENSE), TrainParallelism(2))
    assert rank_order("sequential", holdings, holdings, "ab", 1) == (0, 1)


def test_auto_order_requires_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = training_side(table_for(DENSE), TrainParallelism(2))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with refused(DependencyError, "needs-package"):
        rank_order("auto", holdings, holdings, "ab", 1)
