"""What optimizers hold, in bytes, and when a new weight version is announced."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches
from megatron_patches import OptimizerTensor, errors
from tests.harness.launch import Ranks
from tests.megatron_patches.gpt import Gpt, GptSpec, running

PLAIN = GptSpec()
SPECS = {
    "FP32Optimizer": PLAIN,
    "Float16OptimizerWithFloat16Params": replace(PLAIN, dtype="bf16"),
    "DistributedOptimizer": replace(PLAIN, dtype="bf16", distributed_optimizer=True),
    "fp32 DistributedOptimizer": replace(PLAIN, distributed_optimizer=True),
    "bf16 gradients": replace(PLAIN, dtype="bf16", grad_reduce_in_fp32=False),
    "experts": replace(PLAIN, dtype="bf16", distributed_optimizer=True, num_experts=4, ep=2),
}


@dataclass(frozen=True)
class Inventory:
    """What one rank found: bytes by (kind, key) before and after the first step, and sizes to compare."""

    member_types: list[str]
    before: dict[tuple[str, str], int]
    after: dict[tuple[str, str], int]
    num_params: int
    num_expert_params: int


def bytes_by_kind(tensors: list[OptimizerTensor]) -> dict[tuple[str, str], int]:
    total: Counter[tuple[str, str]] = Counter()
    for found in tensors:
        total[found.kind, found.key] += found.nbytes
    return dict(total)


def check_listing(gpt: Gpt) -> None:
    """Paths lead to the parameter; no memory is listed twice, and none is the model's."""
    tensors = megatron_patches.optimizer_tensors(gpt.optimizer)
    storages = [found.tensor.untyped_storage().data_ptr() for found in tensors]
    assert len(storages) == len(set(storages))
    model = {record.grad_data.untyped_storage().data_ptr() for record in megatron_patches.iter_buffers(gpt.chunks)}
    model |= {param.untyped_storage().data_ptr() for chunk in gpt.chunks for param in chunk.parameters()}
    assert model.isdisjoint(storages)
    for found in tensors:
        param = eval(f"optimizer.{found.path}", {"optimizer": gpt.optimizer})
        assert param.shape == found.tensor.shape
        if found.kind == "main_param":
            assert found.tensor is param


def take_inventory(spec: GptSpec) -> Inventory:
    with running(spec) as gpt:
        before = bytes_by_kind(megatron_patches.optimizer_tensors(gpt.optimizer))
        gpt.train_step()
        check_listing(gpt)
        params = [param for chunk in gpt.chunks for param in chunk.parameters()]
        return Inventory(
            member_types=[type(member).__name__ for member in gpt.optimizer.chained_optimizers],
            before=before,
            after=bytes_by_kind(megatron_patches.optimizer_tensors(gpt.optimizer)),
            num_params=sum(param.numel() for param in params),
            num_expert_params=sum(param.numel() for param in params if not getattr(param, "allreduce", True)),
        )


def check_nested_chain() -> None:
    """A chain within a chain: all tensors are found, with paths through both, and one version per step.

    Megatron steps a nested chain only when the inner one has a single member.
    """
    from megatron.core.optimizer import ChainedOptimizer

    with running(SPECS["experts"]) as gpt:
        gpt.train_step()
        nested = megatron_patches.optimizer_tensors(ChainedOptimizer([gpt.optimizer]))
        flat = megatron_patches.optimizer_tensors(gpt.optimizer)
        assert {found.path.partition(".")[0] for found in flat} == {"chained_optimizers[0]", "chained_optimizers[1]"}
        assert [found.path for found in nested] == [f"chained_optimizers[0].{found.path}" for found in flat]
        assert all(a.tensor is b.tensor for a, b in zip(nested, flat, strict=True))
    with running(PLAIN) as gpt:
        outer = ChainedOptimizer([gpt.optimizer])
        gpt.forward_backward()
        assert outer.step()[0]
        assert megatron_patches.weight_version(outer) == 1


def check_versions(spec: GptSpec) -> None:
    """One version per successful step, however many members take it."""
    with running(spec) as gpt:
        assert megatron_patches.weight_version(gpt.optimizer) == 0
        gpt.train_step()
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 2
        megatron_patches.set_weight_version(gpt.optimizer, 40)
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 41


def check_skipped_step() -> None:
    """Infinite gradients under a grad scaler: the step is skipped and makes no version."""
    with running(replace(PLAIN, dtype="fp16")) as gpt:
        gpt.train_step()
        gpt.forward_backward()
        gpt.chunks[0].buffers[0].grad_data.fill_(float("inf"))
        assert gpt.optimizer.step()[0] is False
        assert megatron_patches.weight_version(gpt.optimizer) == 1
        gpt.train_step()
        assert megatron_patches.weight_version(gpt.optimizer) == 2


GATHERED = ("FP32Optimizer", "bf16 gradients", "DistributedOptimizer", "experts")


class RecordingAllocator:
    """Allocates ordinary memory and remembers what for."""

    def __init__(self) -> None:
        self.flats: list[torch.Tensor] = []

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
        assert kind == "optimizer"
        self.flats.append(torch.full((numel,), torch.nan, dtype=dtype, device=device))
        return self.flats[-1]


def check_gathering(spec: GptSpec) -> None:
    """Main params and moments lie in one flat tensor per member, as the same objects with the same values."""
    allocate = RecordingAllocator()
    with running(spec) as gpt:
        optimizer = gpt.optimizer
        assert megatron_patches.gather_state(optimizer, allocate).buffers == ()  # there are no moments yet
        gpt.train_step()
        before = megatron_patches.optimizer_tensors(optimizer)
        values = [found.tensor.detach().clone() for found in before]
        state = [found for found in before if found.kind != "main_grad"]
        old = [found.tensor.untyped_storage() for found in state]
        gathered = megatron_patches.gather_state(optimizer, allocate)
        assert [buffer.tensor for buffer in gathered.buffers] == allocate.flats
        assert len(allocate.flats) == len(optimizer.chained_optimizers)
        assert {found.kind for found in gathered.outside} <= {"main_grad"}
        assert all(torch._C._storage_Use_Count(storage._cdata) == 1 for storage in old), "old memory is referred to"
        check_same_tensors(optimizer, before, values)
        homes = {flat.untyped_storage().data_ptr() for flat in allocate.flats}
        assert {found.tensor.untyped_storage().data_ptr() for found in state} == homes
        gpt.train_step()
        check_replaced_state(gpt, allocate)


def check_same_tensors(optimizer: Any, before: list[OptimizerTensor], values: list[torch.Tensor]) -> None:
    after = megatron_patches.optimizer_tensors(optimizer)
    for one, other, value in zip(before, after, values, strict=True):
        assert (one.path, one.key) == (other.path, other.key)
        assert one.tensor is other.tensor
        assert torch.equal(other.tensor, value)


def check_replaced_state(gpt: Gpt, allocate: RecordingAllocator) -> None:
    """State that a checkpoint replaced goes where the old one was; nothing is allocated."""
    addresses = [found.tensor.data_ptr() for found in megatron_patches.optimizer_tensors(gpt.optimizer)]
    for member in gpt.optimizer.chained_optimizers:
        for state in member.optimizer.state.values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
    num_flats = len(allocate.flats)
    megatron_patches.gather_state(gpt.optimizer, allocate)
    tensors = megatron_patches.optimizer_tensors(gpt.optimizer)
    assert [found.tensor.data_ptr() for found in tensors] == addresses
    assert len(allocate.flats) == num_flats
    assert all(bool((found.tensor == 0.5).all()) for found in tensors if found.key == "exp_avg")


def check_bad_state_allocators() -> None:
    with running(PLAIN) as gpt:
        gpt.train_step()
        before = [found.tensor.data_ptr() for found in megatron_patches.optimizer_tensors(gpt.optimizer)]
        with pytest.raises(errors.BufferAllocationError, match="the state allocator returned"):
            megatron_patches.gather_state(gpt.optimizer, lambda numel, dtype, device, kind: torch.zeros(1))
        assert [found.tensor.data_ptr() for found in megatron_patches.optimizer_tensors(gpt.optimizer)] == before


def run_rank() -> dict[str, Inventory]:
    inventories = {name: take_inventory(spec) for name, spec in SPECS.items()}
    check_nested_chain()
    overlapped = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    for spec in (*SPECS.values(), replace(PLAIN, **overlapped)):
        check_versions(spec)
    check_skipped_step()
    for name in GATHERED:
        check_gathering(SPECS[name])
    check_bad_state_allocators()
    return inventories


@pytest.fixture(scope="module")
def inventories(engines: Ranks) -> list[dict[str, Inventory]]:
    return engines.launch(run_rank, 2)


MAIN, MAIN_GRAD = ("main_param", "param"), ("main_grad", "grad")
MOMENTS = {("moment", "exp_avg"), ("moment", "exp_avg_sq")}
FLOAT16, DISTRIBUTED = "Float16OptimizerWithFloat16Params", "DistributedOptimizer"


@pytest.mark.parametrize(
    ("name", "members", "before", "after"),
    [
        ("FP32Optimizer", ["FP32Optimizer"], set(), MOMENTS),
        (FLOAT16, [FLOAT16], {MAIN}, {MAIN, *MOMENTS}),
        ("bf16 gradients", [FLOAT16], {MAIN}, {MAIN, MAIN_GRAD, *MOMENTS}),
        (DISTRIBUTED, [DISTRIBUTED], {MAIN}, {MAIN, *MOMENTS}),
        ("fp32 DistributedOptimizer", [DISTRIBUTED], set(), MOMENTS),
        ("experts", [DISTRIBUTED] * 2, {MAIN}, {MAIN, *MOMENTS}),
    ],
)
def test_an_optimizer_holds_four_bytes_of_each_for_an_element(
    inventories: list[dict[str, Inventory]], name: str, members: list[str], before: set[Any], after: set[Any]
) -> None:
    """Each rank has all of it; with the distributed optimizer ranks share dense parameters, and have own experts."""
    found = [rank[name] for rank in inventories]
    experts = sum(each.num_expert_params for each in found)
    assert bool(experts) == (name == "experts")
    nbytes = 4 * (found[0].num_params - found[0].num_expert_params + experts)
    for each in found:
        assert (each.member_types, set(each.before), set(each.after)) == (members, before, after)
    for key in after:
        held = [each.after[key] for each in found]
        assert sum(held) == nbytes if DISTRIBUTED in members else held == [nbytes] * len(found), key


def bare(inner: str = "", **config: Any) -> Any:
    """An object of Megatron's class around an Adam, or an optimizer of another module: a whole one takes more."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer, optimizer.config = False, SimpleNamespace(**config)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    optimizer.optimizer = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer) if inner == "on the host" else adam
    return adam if inner == "alone" else optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (bare("alone"), "the optimizer is of unsupported type Adam; use"),
        (bare("on the host"), "on the host; turn optimizer_cpu_offload off"),
        (bare(use_precision_aware_optimizer=True), "the optimizer is precision-aware.*turn use_precision_aware"),
    ],
)
def test_optimizers_whose_tensors_are_not_known_are_refused(optimizer: Any, message: str) -> None:
    for list_tensors in (megatron_patches.optimizer_tensors, lambda o: megatron_patches.gather_state(o, torch.zeros)):
        with pytest.raises(errors.UnsupportedOptimizerError, match=message):
            list_tensors(optimizer)


def test_steps_of_torchs_optimizers_are_counted_without_any_patch() -> None:
    """Of all members at once as one; those of before a version was set are in it."""
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
