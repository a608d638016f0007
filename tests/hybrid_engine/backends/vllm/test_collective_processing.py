"""Processing that communicates: if a rank fails before it, all ranks fail and none waits.

vLLM's real groups over gloo. The method that reduces over them is made up; it runs in small models
(run_on_rank) and in a real engine (run_engine).
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
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import Call, Ranks
from tests.harness.launch import Outcomes as Launched
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import build, job, refusal_of, sizes
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    Model,
    build_adaptor,
    fill,
    replace,
    transposed,
    untouched,
    with_a_constant_filled,
    with_a_number_beside_the_weight,
)

NUM_RANKS = 2
TIMEOUT = 60.0
FAILING = 1


@dataclass(frozen=True)
class Outcomes:
    """Results of one rank.

    Attributes:
        channels: used by a processing that reduces, and by a processing that only reads the size
            of the group.
        renewed: error of the weights after two fills, by way of filling.
        after_failures: error of the weights after a fill that follows the failures.
        rehearsal, fault, other_kinds, commit, elsewhere, last: errors with type and text.
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
    """Groups of this rank, and models of three layers; the second is reduced over ranks."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import GroupCoordinator

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.job = Job.join(TIMEOUT)
        self.ends = contextlib.ExitStack()
        self.group = GroupCoordinator([[0, 1]], self.rank, "gloo", use_device_communicator=False)
        self.broken = ""  # layer that rank FAILING cannot process

    def reduced(self, layer: Any, method: Any) -> None:
        """Divide by the maximum over ranks, like vLLM's quantised methods with sharded layers."""
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
        return build_adaptor(model, keeps_addresses, self.barrier(), self.rank)

    @contextlib.contextmanager
    def failing(self, layer: str) -> Iterator[None]:
        """Make rank FAILING fail in this layer."""
        self.broken = layer
        yield
        self.broken = ""

    def error_of(self, call: Callable[[], Any]) -> str:
        """Return the error that a switch would raise, or "no error"."""
        try:
            with self.job.agreement.phase("fill"):
                call()
        except HybridEngineError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def gap(self, model: Model, seed: int) -> float:
        """Return the error of the reduced weight; every rank has another seed."""
        weights = [model.weights(seed * NUM_RANKS + rank)["second"] for rank in range(NUM_RANKS)]
        expected = weights[self.rank] / max(weight.abs().amax() for weight in weights)
        return float((model.second.weight.data - expected).abs().max())

    def fill(self, adaptor: VllmAdaptor, model: Model, seed: int) -> None:
        fill(adaptor, model, seed * NUM_RANKS + self.rank)


def run_on_rank() -> Outcomes:
    rig = Rig()
    outcomes = Outcomes(
        taken_channels(rig),
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


def taken_channels(rig: Rig) -> tuple[set[str], set[str]]:
    with channels_taken() as with_reduction:
        rig.model().process()
    with channels_taken() as without_reduction:
        rig.model(second=rig.local).process()
    return with_reduction, without_reduction


def renewed(rig: Rig, keeps_addresses: bool) -> float:
    model = rig.model()
    adaptor = rig.adaptor(model, keeps_addresses)
    gaps = []
    for seed in range(2):
        rig.fill(adaptor, model, seed)
        gaps.append(rig.gap(model, seed))
    return max(gaps)


def rehearsal_that_fails(rig: Rig) -> str:
    """Fail when processing is repeated, after vLLM's own processing succeeded."""
    model = rig.model()
    process = model.process

    def process_and_break() -> None:
        process()
        rig.broken = "first"

    model.process = process_and_break  # type: ignore[method-assign]
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
    """Results of one rank of an engine.

    Attributes:
        commit: the error when one rank fails.
        differences: parameters that differ bitwise from the sent weights after another fill.
    """

    is_collective: bool
    commit: str
    differences: list[str]


def run_engine(directory: str) -> Engine:
    """Run an engine in which processing linear layers reduces an unused scale."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Method

    process = Method.process_weights_after_loading
    weights = support.random_weights(support.LLAMA, 0)
    checkpoint = support.write_checkpoint(Path(directory), support.LLAMA, weights)

    # The scale is a derived tensor, which some kernels of this CPU do not need otherwise.
    def reduce_and_process(method: Any, layer: Any) -> None:
        layer.largest = layer.weight.data.abs().amax().float()
        dist.all_reduce(layer.largest, op=dist.ReduceOp.MAX, group=get_tp_group().device_group)
        process(method, layer)

    def fail(name: str, tensor: torch.Tensor) -> None:
        if name.startswith("model.layers.1.") and dist.get_rank() == FAILING:
            raise MemoryError("no memory to look at it")

    def fill_together() -> TensorDict:
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


def test_communication_is_detected_and_reduced_weights_are_renewed(by_rank: list[Outcomes]) -> None:
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
def test_weights_that_one_rank_cannot_renew_are_refused_on_all(
    by_rank: list[Outcomes], attempt: str, reason: str
) -> None:
    waiting, failed = (getattr(rank, attempt) for rank in by_rank)
    assert failed.startswith("ModelError: vLLM computes with weights that cannot be renewed (1):")
    assert waiting.startswith("RemoteError: rank 1 failed before ")
    assert reason in failed
    assert reason in waiting


def test_a_commit_that_fails_on_one_rank_fails_on_all(by_rank: list[Outcomes]) -> None:
    other, failed = (rank.commit for rank in by_rank)
    assert failed == "ReshardError: fill: MemoryError: no memory for first"
    assert other == "RemoteError: rank 1 failed before processing second\nrank 1: MemoryError: no memory for first"


def test_no_rank_waits_for_a_rank_that_failed_elsewhere(by_rank: list[Outcomes]) -> None:
    assert by_rank[FAILING].elsewhere == "ReshardError: fill: MemoryError: no memory for a message"
    cause = "rank 1: MemoryError: no memory for a message"
    assert by_rank[0].elsewhere == f"RemoteError: rank 1 failed before processing first\n{cause}"
    assert by_rank[0].last.startswith("RemoteError: rank 1 failed before the last group's end\n")


def test_ranks_that_process_different_layers_are_refused(by_rank: list[Outcomes]) -> None:
    for rank, first in enumerate(("first", "second")):
        text = f"rank {rank} has reached processing {first}"
        assert text in by_rank[rank].other_kinds


def test_an_engine_with_collective_processing_fails_on_all_ranks_and_recovers(launched: Launched) -> None:
    other, failed = launched["engine"]
    assert failed.is_collective
    assert other.is_collective
    assert failed.commit == "fill: MemoryError: no memory to look at it"
    assert other.commit.startswith("rank 1 failed before processing model.layers.1.")
    assert other.commit.endswith("\nrank 1: MemoryError: no memory to look at it")
    assert failed.differences == other.differences == []
