"""Processing in which ranks wait for each other: one that fails before it makes all of them fail, and none waits.

Real groups of vLLM's over gloo; the method that reduces over them is made up, and then put into a real engine. One
launch; see run_on_rank, run_engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier, channels_taken
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Call, Ranks
from tests.harness.launch import Outcomes as Launched
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import build, job, refusal_of, sizes
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    Model,
    built,
    fill,
    replace,
    transposed,
    untouched,
    with_a_constant_filled,
    with_a_number_beside_the_weight,
)

NUM_RANKS, TIMEOUT = 2, 60.0
FAILING = 1


@dataclass(frozen=True)
class Outcomes:
    """What one rank brought back, by test.

    Attributes:
        channels: taken by a processing that reduces, and by one that only asks for the group's size.
        renewed: how the weights after two fills differ from what all ranks' weights give, by way of filling.
        others: errors: type and text.
    """

    channels: tuple[set[str], set[str]]
    renewed: dict[str, float]
    rehearsal: str
    fault: str
    other_kinds: str
    commit: str
    elsewhere: str
    last: str
    after_failures: float


class Rig:
    """This rank's groups, and models of three layers: the second is reduced over the ranks."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import GroupCoordinator

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.job = Job.join(TIMEOUT)
        self.ends = contextlib.ExitStack()
        self.group = GroupCoordinator([[0, 1]], self.rank, "gloo", use_device_communicator=False)
        self.broken = ""  # the layer that one rank cannot process

    def reduced(self, layer: Any, method: Any) -> None:
        """As vLLM's methods that quantise do with the scales of sharded layers."""
        largest = layer.weight.data.abs().amax()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group.device_group)
        replace(layer, weight=layer.weight.data / largest)

    def local(self, layer: Any, method: Any) -> None:
        replace(layer, weight=layer.weight.data / (self.group.world_size + self.group.rank_in_group))

    def barrier(self) -> ProcessingBarrier:
        return ProcessingBarrier(self.rank, self.job.new_group(self.ends))

    def model(self, **processing: Callable[[Any, Any], None]) -> Model:
        layers = {"first": transposed, "second": self.reduced, "third": transposed, **processing}
        return Model(**{name: functools.partial(self.process, name, layers[name]) for name in layers})

    def process(self, name: str, processing: Callable[[Any, Any], None], layer: Any, method: Any) -> None:
        if name == self.broken and self.rank == FAILING:
            raise MemoryError(f"no memory for {name}")
        processing(layer, method)

    def adaptor(self, model: Model, keeps_addresses: bool) -> VllmAdaptor:
        return built(model, keeps_addresses, self.barrier(), self.rank)

    @contextlib.contextmanager
    def failing(self, layer: str) -> Iterator[None]:
        """Within this context one rank cannot process this layer."""
        self.broken = layer
        yield
        self.broken = ""

    def error_of(self, call: Callable[[], Any]) -> str:
        """What all ranks raise of it, as they leave a phase of a switch."""
        try:
            with self.job.agreement.phase("fill"):
                call()
        except HybridEngineError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def gap(self, model: Model, seed: int) -> float:
        """Between the reduced weight and what it should be; weights of a rank have a seed of its own."""
        of_all = [model.weights(seed * NUM_RANKS + rank)["second"] for rank in range(NUM_RANKS)]
        expected = of_all[self.rank] / max(weight.abs().amax() for weight in of_all)
        return float((model.second.weight.data - expected).abs().max())

    def fill(self, adaptor: VllmAdaptor, model: Model, seed: int) -> None:
        fill(adaptor, model, seed * NUM_RANKS + self.rank)


def run_on_rank() -> Outcomes:
    rig = Rig()
    outcomes = Outcomes(
        channels(rig),
        {name: renewed(rig, keeps) for name, keeps in (("in place", True), ("anew", False))},
        rehearsal_that_fails(rig),
        rig.error_of(
            lambda: rig.adaptor(
                rig.model(first=with_a_number_beside_the_weight if rig.rank else with_a_constant_filled), True
            )
        ),
        rig.error_of(lambda: rig.adaptor(rig.model(**({"first": untouched} if rig.rank else {})), True)),
        *fills_that_fail(rig),
    )
    rig.ends.close()
    rig.job.close()
    return outcomes


def channels(rig: Rig) -> tuple[set[str], set[str]]:
    with channels_taken() as of_reduced:
        rig.model().process()
    with channels_taken() as of_local:
        rig.model(second=rig.local).process()
    return of_reduced, of_local


def renewed(rig: Rig, keeps_addresses: bool) -> float:
    model = rig.model()
    adaptor = rig.adaptor(model, keeps_addresses)
    gaps = []
    for seed in range(2):
        rig.fill(adaptor, model, seed)
        gaps.append(rig.gap(model, seed))
    return max(gaps)


def rehearsal_that_fails(rig: Rig) -> str:
    """vLLM's own processing has gone well; what is done again does not."""
    model = rig.model()
    process = model.process

    def and_break() -> None:
        process()
        rig.broken = "first"

    model.process = and_break  # type: ignore[method-assign]
    error = rig.error_of(lambda: rig.adaptor(model, True))
    rig.broken = ""
    return error


def fills_that_fail(rig: Rig) -> tuple[str, str, str, float]:
    model = rig.model()
    adaptor = rig.adaptor(model, True)

    def fill_and_fail_elsewhere() -> None:
        if rig.rank == FAILING:
            adaptor.release()
            adaptor.allocate(["first"])
            adaptor.abandon()
            raise MemoryError("no memory for a message")
        rig.fill(adaptor, model, 0)

    with rig.failing("first"):
        in_commit = rig.error_of(lambda: rig.fill(adaptor, model, 0))
    elsewhere = rig.error_of(fill_and_fail_elsewhere)
    with rig.failing("third"):
        last = rig.error_of(lambda: rig.fill(adaptor, model, 0))
    rig.fill(adaptor, model, 3)
    return in_commit, elsewhere, last, rig.gap(model, 3)


@dataclass(frozen=True)
class Engine:
    """What one rank of an engine with such a method brought back.

    Attributes:
        commit: the error when one rank fails.
        differences: parameters with other bits than were sent, after a further fill.
    """

    is_collective: bool
    commit: str
    differences: list[str]


def run_engine(directory: str) -> Engine:
    """One whose linear layers reduce a scale while they are processed, keep it beside the weight, and do not use it.

    So something is derived of each layer's weight, whether the kernels of this CPU pack it or not.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Method

    process, weights = Method.process_weights_after_loading, support.random_weights(support.LLAMA, 0)
    checkpoint = support.write_checkpoint(Path(directory), support.LLAMA, weights)

    def reduce_and_process(method: Any, layer: Any) -> None:
        layer.largest = layer.weight.data.abs().amax().float()
        dist.all_reduce(layer.largest, op=dist.ReduceOp.MAX, group=get_tp_group().device_group)
        process(method, layer)

    def fail(name: str, tensor: torch.Tensor) -> None:
        if name.startswith("model.layers.1.") and dist.get_rank() == FAILING:
            raise MemoryError("no memory to look at it")

    def fill_together() -> dict[str, torch.Tensor]:
        with job().agreement.phase("fill"):
            return support.fill_by_records(engine.adaptor, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "process_weights_after_loading", reduce_and_process)
        engine = build(checkpoint, support.LLAMA, sizes=sizes(tensor=NUM_RANKS))
        with engine.adaptor.observed(fail):
            commit = refusal_of(fill_together).message
        engine.release()
        differences = support.differences(fill_together(), support.native_parameters(engine, checkpoint))
        is_collective = engine.adaptor._processed.barrier.is_collective
        engine.shutdown()
    return Engine(is_collective, commit, differences)


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    calls: dict[str, Call] = {
        "made up": (run_on_rank, ()),
        "engine": (run_engine, (str(tmp_path_factory.mktemp("m")),)),
    }
    return engines.launch_in_turn(NUM_RANKS, calls, timeout=200)


@pytest.fixture(scope="module")
def by_rank(launched: Launched) -> list[Outcomes]:
    return launched["made up"]


def test_what_communicates_is_seen_and_what_is_reduced_over_ranks_is_renewed(by_rank: list[Outcomes]) -> None:
    for rank in by_rank:
        assert rank.channels == ({"device_group"}, set())
        assert rank.renewed == {"in place": 0, "anew": 0}
        assert rank.after_failures == 0


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        ("rehearsal", "first (Method): its processing cannot run again: MemoryError: no memory for first"),
        ("fault", "quant_method.kernel.largest is a number that depends on the weights"),
    ],
)
def test_what_one_rank_alone_cannot_renew_is_the_reason_of_all(
    by_rank: list[Outcomes], attempt: str, reason: str
) -> None:
    other, failed = (getattr(rank, attempt) for rank in by_rank)
    assert failed.startswith("ModelError: vLLM computes with weights that cannot be renewed (1):")
    assert other.startswith("RemoteError: rank 1 failed before ")
    assert reason in failed
    assert reason in other


def test_a_commit_that_fails_on_one_rank_fails_on_all(by_rank: list[Outcomes]) -> None:
    other, failed = (rank.commit for rank in by_rank)
    assert failed == "ReshardError: fill: MemoryError: no memory for first"
    assert other == "RemoteError: rank 1 failed before processing second\nrank 1: MemoryError: no memory for first"


def test_a_rank_that_fails_elsewhere_or_last_is_not_waited_for(by_rank: list[Outcomes]) -> None:
    assert by_rank[FAILING].elsewhere == "ReshardError: fill: MemoryError: no memory for a message"
    cause = "rank 1: MemoryError: no memory for a message"
    assert by_rank[0].elsewhere == f"RemoteError: rank 1 failed before processing first\n{cause}"
    assert by_rank[0].last.startswith("RemoteError: rank 1 failed before the last group's end\n")


def test_ranks_that_would_process_different_things_are_refused(by_rank: list[Outcomes]) -> None:
    for rank, first in enumerate(("first", "second")):
        text = f"rank {rank} has reached processing {first}"
        assert text in by_rank[rank].other_kinds


def test_an_engine_whose_layers_reduce_fails_as_one_and_fills_again(launched: Launched) -> None:
    other, failed = launched["engine"]
    assert failed.is_collective
    assert other.is_collective
    assert failed.commit == "fill: MemoryError: no memory to look at it"
    assert other.commit.startswith("rank 1 failed before processing model.layers.1.")
    assert other.commit.endswith("\nrank 1: MemoryError: no memory to look at it")
    assert failed.differences == other.differences == []
