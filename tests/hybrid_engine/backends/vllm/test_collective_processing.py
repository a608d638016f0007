"""Processing that communicates: if a rank fails before it, all ranks fail and none waits.

vLLM's real groups over gloo. The method that reduces over them is made up; it runs in small models
of a rig, and in a real engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.errors import HybridEngineError, ModelError, ReshardError
from hybrid_engine.ranks.job import Job
from tests.harness.errors import failing
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import build, job, sizes
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


class Rig:
    """Groups of this rank, and models of three layers; the second is reduced over ranks."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        from vllm.distributed.parallel_state import GroupCoordinator

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.job = ends.enter_context(contextlib.closing(Job.join(TIMEOUT)))
        self.ends = ends
        self.group = GroupCoordinator([[0, 1]], self.rank, "gloo", use_device_communicator=False)
        self.broken = ""  # layer that rank FAILING cannot process

    def reduced(self, layer: Any, method: Any) -> None:
        """Divide by the maximum over ranks, like vLLM's quantised methods with sharded layers."""
        largest = layer.weight.data.abs().amax()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group.device_group)
        replace(layer, weight=layer.weight.data / largest)

    def barrier(self) -> ProcessingBarrier:
        return ProcessingBarrier(self.rank, self.job.new_group(self.ends))

    def model(self, **processing: Callable[[Any, Any], None]) -> Model:
        layers = {"first": transposed, "second": self.reduced, "third": transposed, **processing}
        return Model(
            **{name: functools.partial(self.process, name, layers[name]) for name in layers}
        )

    def process(
        self, name: str, processing: Callable[[Any, Any], None], layer: Any, method: Any
    ) -> None:
        if name == self.broken and self.rank == FAILING:
            raise MemoryError(f"no memory for {name}")
        processing(layer, method)

    def adaptor(self, model: Model, keeps_addresses: bool) -> VllmAdaptor:
        return build_adaptor(model, keeps_addresses, self.barrier(), self.rank)

    def build(self, **processing: Callable[[Any, Any], None]) -> None:
        self.adaptor(self.model(**processing), True)

    @contextlib.contextmanager
    def refused(
        self, kind: type[HybridEngineError], code: str, failed: str, other: str
    ) -> Iterator[None]:
        """Assert that a fill fails on rank FAILING with `kind`, and on the other since it did not
        come.
        """
        pattern = failed if self.rank == FAILING else other
        with failing(kind, code, pattern, on=FAILING), self.job.agreement.phase("fill"):
            yield

    def fill(self, adaptor: VllmAdaptor, model: Model, seed: int) -> None:
        """Fill with another seed on every rank, and check the reduced weight."""
        fill(adaptor, model, seed * NUM_RANKS + self.rank)
        weights = [model.weights(seed * NUM_RANKS + rank)["second"] for rank in range(NUM_RANKS)]
        expected = weights[self.rank] / max(weight.abs().amax() for weight in weights)
        assert torch.equal(model.second.weight.data, expected)


@contextlib.contextmanager
def rigged() -> Iterator[Rig]:
    with contextlib.ExitStack() as ends:
        yield Rig(ends)


@on_engines(NUM_RANKS)
@pytest.mark.parametrize("keeps_addresses", [True, False])
def test_reduced_weights_are_renewed(keeps_addresses: bool) -> None:
    with rigged() as rig:
        model = rig.model()
        adaptor = rig.adaptor(model, keeps_addresses)
        assert adaptor._processed.barrier.is_collective, "communication was not detected"
        for seed in range(2):
            rig.fill(adaptor, model, seed)


@on_engines(NUM_RANKS)
def test_weights_that_one_rank_cannot_renew_are_refused_on_all() -> None:
    with rigged() as rig:
        reason = "quant_method.kernel.largest is a number that depends on the weights"
        with rig.refused(ModelError, "weights-not-renewable", reason, reason):
            rig.build(first=with_a_number_beside_the_weight if rig.rank else with_a_constant_filled)
        model = rig.model()
        process = model.process

        def process_and_break() -> None:
            process()
            rig.broken = "first"

        model.process = process_and_break  # type: ignore[method-assign]
        # vLLM's own processing succeeded.
        reason = (
            r"first \(Method\): its processing cannot run again: MemoryError: no memory for first"
        )
        with rig.refused(ModelError, "weights-not-renewable", reason, reason):
            rig.adaptor(model, True)


@on_engines(NUM_RANKS)
def test_ranks_that_process_different_layers_are_refused() -> None:
    with rigged() as rig:
        step = f"rank {rig.rank} has reached processing {'second' if rig.rank else 'first'}"
        with failing(ReshardError, "different-processing", step), rig.job.agreement.phase("fill"):
            rig.build(**({"first": untouched} if rig.rank else {}))


@on_engines(NUM_RANKS)
def test_a_fill_that_fails_on_one_rank_fails_on_all() -> None:
    with rigged() as rig:
        model = rig.model()
        adaptor = rig.adaptor(model, True)
        for broken, step in (("first", "processing second"), ("third", "the last group's end")):
            rig.broken = broken
            cause = f"MemoryError: no memory for {broken}"
            other = f"rank 1 failed before {step}\nrank 1: {cause}"
            with rig.refused(ReshardError, "unexpected-error", f"fill: {cause}", other):
                rig.fill(adaptor, model, 0)
        rig.broken = ""
        cause = "MemoryError: no memory for a message"
        other = f"rank 1 failed before processing first\nrank 1: {cause}"
        with rig.refused(ReshardError, "unexpected-error", f"fill: {cause}", other):
            if rig.rank == FAILING:  # elsewhere
                adaptor.release()
                adaptor.allocate(["first"])
                adaptor.abandon()
                raise MemoryError("no memory for a message")
            rig.fill(adaptor, model, 0)
        rig.fill(adaptor, model, 3)


@on_engines(NUM_RANKS)
def test_an_engine_with_collective_processing_fails_on_all_ranks_and_recovers(
    tmp_path: Path,
) -> None:
    """Processing linear layers reduces an unused scale."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Method

    process = Method.process_weights_after_loading
    weights = support.random_weights(support.LLAMA, 0)
    checkpoint = support.write_checkpoint(tmp_path, support.LLAMA, weights)

    # The scale is a derived tensor, which some kernels of this CPU do not need otherwise.
    def reduce_and_process(method: Any, layer: Any) -> None:
        layer.largest = layer.weight.data.abs().amax().float()
        dist.all_reduce(layer.largest, op=dist.ReduceOp.MAX, group=get_tp_group().device_group)
        process(method, layer)

    def fail(name: str, tensor: torch.Tensor) -> None:
        if name.startswith("model.layers.1.") and dist.get_rank() == FAILING:
            raise MemoryError("no memory to look at it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "process_weights_after_loading", reduce_and_process)
        engine = build(checkpoint, support.LLAMA, sizes=sizes(tensor=NUM_RANKS))
        cause = "MemoryError: no memory to look at it"
        other = rf"rank 1 failed before processing model\.layers\.1\..*\nrank 1: {cause}"
        pattern = f"fill: {cause}" if dist.get_rank() == FAILING else other
        refused = failing(ReshardError, "unexpected-error", pattern, on=FAILING)
        with engine.adaptor.observed(fail), refused, job().agreement.phase("fill"):
            support.write_by_records(engine.adaptor, weights)
        engine.release()
        filled = support.fill_by_records(engine.adaptor, weights)
        assert support.differences(filled, support.native_parameters(engine, checkpoint)) == []
        assert engine.adaptor._processed.barrier.is_collective
        engine.shutdown()
