"""Tensors of optimizers with their bytes, and the version of the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches
from megatron_patches import OptimizerTensor, errors
from tests.harness.launch import of_all_ranks, on_engines
from tests.megatron_patches.gpt import Gpt, GptSpec, running
from tests.megatron_patches.test_buffers import RecordingAllocator

PLAIN = GptSpec()
SPECS = {
    "FP32Optimizer": PLAIN,
    "Float16OptimizerWithFloat16Params": replace(PLAIN, dtype="bf16"),
    "DistributedOptimizer": replace(PLAIN, dtype="bf16", distributed_optimizer=True),
    "fp32 DistributedOptimizer": replace(PLAIN, distributed_optimizer=True),
    "bf16 gradients": replace(PLAIN, dtype="bf16", grad_reduce_in_fp32=False),
    "experts": replace(PLAIN, dtype="bf16", distributed_optimizer=True, num_experts=4, ep=2),
}


MAIN = ("main_param", "param")
MAIN_GRAD = ("main_grad", "grad")
MOMENTS = {("moment", "exp_avg"), ("moment", "exp_avg_sq")}
FLOAT16 = "Float16OptimizerWithFloat16Params"
DISTRIBUTED = "DistributedOptimizer"
STATES: dict[str, tuple[list[str], set[Any], set[Any]]] = {
    "FP32Optimizer": (["FP32Optimizer"], set(), MOMENTS),
    "Float16OptimizerWithFloat16Params": ([FLOAT16], {MAIN}, {MAIN, *MOMENTS}),
    "DistributedOptimizer": ([DISTRIBUTED], {MAIN}, {MAIN, *MOMENTS}),
    "fp32 DistributedOptimizer": ([DISTRIBUTED], set(), MOMENTS),
    "bf16 gradients": ([FLOAT16], {MAIN}, {MAIN, MAIN_GRAD, *MOMENTS}),
    "experts": ([DISTRIBUTED] * 2, {MAIN}, {MAIN, *MOMENTS}),
}
"""Types of the members, and kinds of state before and after the first step."""


@on_engines({2: SPECS})
def test_every_state_of_an_optimizer_takes_four_bytes_per_element(case: str) -> None:
    """The distributed optimizer shards dense parameters; experts differ between ranks."""
    members, before, after = STATES[case]
    with running(SPECS[case]) as gpt:
        assert [type(member).__name__ for member in gpt.optimizer.chained_optimizers] == members
        assert bytes_by_kind(gpt.optimizer).keys() == before
        gpt.train_step()
        check_listing(gpt)
        nbytes = bytes_by_kind(gpt.optimizer)
        assert nbytes.keys() == after
        params = [param for chunk in gpt.chunks for param in chunk.parameters()]
        dense = sum(param.numel() for param in params if getattr(param, "allreduce", True))
        experts = of_all_ranks(
            sum(param.numel() for param in params if not getattr(param, "allreduce", True))
        )
        assert all(experts) == any(experts) == (case == "experts")
        of_all = 4 * (dense + sum(experts))
        for key in sorted(after):
            held = of_all_ranks(nbytes[key])
            assert sum(held) == of_all if DISTRIBUTED in members else held == [of_all] * 2, key


def bytes_by_kind(optimizer: Any) -> Counter[tuple[str, str]]:
    total = Counter()
    for entry in megatron_patches.optimizer_tensors(optimizer):
        total[entry.kind, entry.key] += entry.nbytes
    return total


def check_listing(gpt: Gpt) -> None:
    """Check the paths; no memory may be listed twice or belong to the model."""
    tensors = megatron_patches.optimizer_tensors(gpt.optimizer)
    storages = [entry.tensor.untyped_storage().data_ptr() for entry in tensors]
    assert len(storages) == len(set(storages))
    model = {
        record.grad_data.untyped_storage().data_ptr()
        for record in megatron_patches.iter_buffers(gpt.chunks)
    }
    model |= {
        param.untyped_storage().data_ptr() for chunk in gpt.chunks for param in chunk.parameters()
    }
    assert model.isdisjoint(storages)
    for entry in tensors:
        param = eval(f"optimizer.{entry.path}", {"optimizer": gpt.optimizer})
        assert param.shape == entry.tensor.shape
        if entry.kind == "main_param":
            assert entry.tensor is param


@on_engines(2)
def test_a_chain_in_a_chain_is_listed_whole() -> None:
    """Tensors of both are listed, with paths through both, and a step is one version.

    Megatron can step a nested chain only if the inner chain has a single member.
    """
    from megatron.core.optimizer import ChainedOptimizer

    with running(SPECS["experts"]) as gpt:
        gpt.train_step()
        nested = megatron_patches.optimizer_tensors(ChainedOptimizer([gpt.optimizer]))
        flat = megatron_patches.optimizer_tensors(gpt.optimizer)
        assert {entry.path.partition(".")[0] for entry in flat} == {
            "chained_optimizers[0]",
            "chained_optimizers[1]",
        }
        assert [entry.path for entry in nested] == [
            f"chained_optimizers[0].{entry.path}" for entry in flat
        ]
        assert all(a.tensor is b.tensor for a, b in zip(nested, flat, strict=True))
    with running(PLAIN) as gpt:
        outer = ChainedOptimizer([gpt.optimizer])
        gpt.forward_backward()
        assert outer.step()[0]
        assert megatron_patches.weight_version(outer) == 1


OVERLAPPED = {
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
OVERLAPPED_SPECS = {**SPECS, "overlapped": replace(PLAIN, **OVERLAPPED)}


@on_engines({2: OVERLAPPED_SPECS})
def test_each_successful_step_is_one_version(case: str) -> None:
    """A step of several members counts once."""
    with running(OVERLAPPED_SPECS[case]) as gpt:
        assert megatron_patches.weight_version(gpt.optimizer) == 0
        gpt.train_step()
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 2
        megatron_patches.set_weight_version(gpt.optimizer, 40)
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 41


@on_engines(2)
def test_a_step_skipped_because_of_infinite_gradients_is_no_version() -> None:
    with running(replace(PLAIN, dtype="fp16")) as gpt:
        gpt.train_step()
        gpt.forward_backward()
        gpt.chunks[0].buffers[0].grad_data.fill_(float("inf"))
        assert gpt.optimizer.step()[0] is False
        assert megatron_patches.weight_version(gpt.optimizer) == 1
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 2


GATHERED = ("FP32Optimizer", "bf16 gradients", "DistributedOptimizer", "experts")


@on_engines({2: GATHERED})
def test_main_params_and_moments_move_to_one_flat_tensor_per_member(case: str) -> None:
    allocate = RecordingAllocator(torch.nan)
    with running(SPECS[case]) as gpt:
        optimizer = gpt.optimizer
        assert megatron_patches.gather_state(optimizer, allocate).buffers == ()  # No moments yet.
        gpt.train_step()
        before = megatron_patches.optimizer_tensors(optimizer)
        values = [entry.tensor.detach().clone() for entry in before]
        state = [entry for entry in before if entry.kind != "main_grad"]
        old = [entry.tensor.untyped_storage() for entry in state]
        gathered = megatron_patches.gather_state(optimizer, allocate)
        assert [buffer.tensor for buffer in gathered.buffers] == allocate.tensors
        assert len(allocate.tensors) == len(optimizer.chained_optimizers)
        assert {entry.kind for entry in gathered.outside} <= {"main_grad"}
        assert all(torch._C._storage_Use_Count(storage._cdata) == 1 for storage in old), (
            "old memory is still referenced"
        )
        check_same_tensors(optimizer, before, values)
        homes = {flat.untyped_storage().data_ptr() for flat in allocate.tensors}
        assert {entry.tensor.untyped_storage().data_ptr() for entry in state} == homes
        gpt.train_step()
        check_replaced_state(gpt, allocate)
    assert {kind for *_, kind in allocate.calls} == {"optimizer"}


def check_same_tensors(
    optimizer: Any, before: list[OptimizerTensor], values: list[torch.Tensor]
) -> None:
    after = megatron_patches.optimizer_tensors(optimizer)
    for old, new, value in zip(before, after, values, strict=True):
        assert (old.path, old.key) == (new.path, new.key)
        assert old.tensor is new.tensor
        assert torch.equal(new.tensor, value)


def check_replaced_state(gpt: Gpt, allocate: RecordingAllocator) -> None:
    """Check that state replaced by a checkpoint moves to the old memory, without an allocation."""
    addresses = [
        entry.tensor.data_ptr() for entry in megatron_patches.optimizer_tensors(gpt.optimizer)
    ]
    for member in gpt.optimizer.chained_optimizers:
        for state in member.optimizer.state.values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
    num_flats = len(allocate.tensors)
    megatron_patches.gather_state(gpt.optimizer, allocate)
    tensors = megatron_patches.optimizer_tensors(gpt.optimizer)
    assert [entry.tensor.data_ptr() for entry in tensors] == addresses
    assert len(allocate.tensors) == num_flats
    assert all(bool((entry.tensor == 0.5).all()) for entry in tensors if entry.key == "exp_avg")


@on_engines(2)
def test_a_wrong_tensor_of_an_allocator_is_refused() -> None:
    with running(PLAIN) as gpt:
        gpt.train_step()
        before = [
            entry.tensor.data_ptr() for entry in megatron_patches.optimizer_tensors(gpt.optimizer)
        ]
        with pytest.raises(errors.BufferAllocationError, match="the state allocator returned"):
            megatron_patches.gather_state(
                gpt.optimizer, lambda numel, dtype, device, kind: torch.zeros(1)
            )
        assert [
            entry.tensor.data_ptr() for entry in megatron_patches.optimizer_tensors(gpt.optimizer)
        ] == before


def bare(inner: str = "", **config: Any) -> Any:
    """Return an incomplete Megatron optimizer around an optimizer of torch, or Adam alone."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer = False
    optimizer.config = SimpleNamespace(**config)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    optimizer.optimizer = (
        HybridDeviceOptimizer.__new__(HybridDeviceOptimizer) if inner == "on the host" else adam
    )
    return adam if inner == "alone" else optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (bare("alone"), "the optimizer is of unsupported type Adam; use"),
        (bare("on the host"), "on the host; turn optimizer_cpu_offload off"),
        (
            bare(use_precision_aware_optimizer=True),
            "the optimizer is precision-aware.*turn use_precision_aware",
        ),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer: Any, message: str) -> None:
    for list_tensors in (
        megatron_patches.optimizer_tensors,
        lambda o: megatron_patches.gather_state(o, torch.zeros),
    ):
        with pytest.raises(errors.UnsupportedOptimizerError, match=message):
            list_tensors(optimizer)


def test_steps_of_torchs_optimizers_are_counted_without_patches() -> None:
    """A step of all members counts once. A version that is set includes earlier steps."""
    from megatron.core.optimizer import ChainedOptimizer

    weights = torch.nn.Parameter(torch.zeros(2))
    members = [SimpleNamespace(optimizer=torch.optim.Adam([weights])) for _ in range(2)]
    optimizer = ChainedOptimizer.__new__(ChainedOptimizer)
    optimizer.chained_optimizers = members
    assert megatron_patches.weight_version(optimizer) == 0
    for steps in (1, 2):
        for member in members:
            weights.grad = torch.ones(2)
            member.optimizer.step()
        assert megatron_patches.weight_version(optimizer) == steps
    megatron_patches.set_weight_version(optimizer, 40)
    members[1].optimizer.step()
    assert megatron_patches.weight_version(optimizer) == 41
    with pytest.raises(ValueError, match="-1"):
        megatron_patches.set_weight_version(optimizer, -1)
