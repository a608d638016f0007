"""Buffer records describe the live memory, and the allocator hook provides it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches
from megatron_patches import BufferRecord, errors
from megatron_patches.buffers import _Redirected
from tests.harness.core_versions import without
from tests.harness.launch import on_engines
from tests.megatron_patches.gpt import Gpt, GptSpec, build, running, start, stop

SHARDED = GptSpec(
    num_layers=3, distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=6000
)
FLOAT32_GRADS = {"param_name_patterns_for_fp32_local_accumulation": ("*.linear_fc1.weight",)}
ALL_SPECS = {
    "sharded": SHARDED,
    "replicated": replace(SHARDED, distributed_optimizer=False),
    "experts": replace(SHARDED, dtype="bf16", num_experts=4, ep=2),
    "chunks": replace(SHARDED, num_layers=4, pp=2, vpp=2, tied=True),
    "some fp32 gradients": replace(
        SHARDED, dtype="bf16", grad_reduce_in_fp32=False, ddp_overrides=FLOAT32_GRADS
    ),
}
SPECS = without(ALL_SPECS, "some fp32 gradients", since="0.17.0")


def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.nbytes == right.nbytes


def check_record(record: BufferRecord, gpt: Gpt) -> None:
    """Check that the record's numbers and views agree with each other and with the model."""
    names = dict(gpt.chunks[record.chunk_index].named_parameters())
    assert record.grad_data.dim() == 1
    assert record.grad_data.dtype == (
        torch.float32 if gpt.spec.grad_reduce_in_fp32 else gpt.spec.params_dtype
    )
    assert bool(record.extra_grads) == bool(gpt.spec.ddp_overrides)
    assert (record.param_data is not None) == gpt.spec.distributed_optimizer
    if record.param_data is not None:
        assert record.param_data.shape == record.grad_data.shape
        assert record.param_data.dtype == gpt.spec.params_dtype
    position = 0
    for slot in record.slots:
        assert position <= slot.start < slot.end <= record.grad_data.numel()
        position = slot.end
        assert names[slot.name] is slot.param
        assert slot.end - slot.start == slot.param.numel()
        gradients = [record.grad_data[slot.start : slot.end], *record.extra_grads]
        assert any(same_memory(slot.param.main_grad, gradient) for gradient in gradients)
        if record.param_data is not None:
            assert same_memory(slot.param, record.param_data[slot.start : slot.end])


def check_writes_reach_the_model(records: list[BufferRecord]) -> None:
    """Check that parameters read the numbers written at their recorded places."""
    for record in records:
        if record.param_data is None:
            continue
        record.param_data.copy_(torch.arange(record.param_data.numel()) % 251)
        for slot in record.slots:
            expected = (torch.arange(slot.start, slot.end) % 251).to(slot.param.dtype)
            assert torch.equal(slot.param.detach().reshape(-1), expected)


KINDS = {"experts": [(0, "dense"), (0, "expert")], "chunks": [(0, "dense"), (1, "dense")]}
"""Chunk and kind of each record, where it is not a single dense one."""


@on_engines({2: SPECS})
def test_records_describe_the_live_memory(case: str) -> None:
    with running(SPECS[case]) as gpt:
        gpt.train_step()
        gpt.train_step()
        records = megatron_patches.iter_buffers(gpt.chunks)
        for record in records:
            check_record(record, gpt)
        slots = [(record.chunk_index, slot.name) for record in records for slot in record.slots]
        params = [
            (i, name) for i, chunk in enumerate(gpt.chunks) for name, _ in chunk.named_parameters()
        ]
        assert sorted(slots) == sorted(params), "a parameter is in no buffer or in several"
        check_writes_reach_the_model(records)
        assert [(record.chunk_index, record.kind) for record in records] == KINDS.get(
            case, [(0, "dense")]
        )


@on_engines(2)
def test_a_parameter_elsewhere_takes_no_others_out_of_the_record() -> None:
    with running(SHARDED) as gpt:
        for record in megatron_patches.iter_buffers(gpt.chunks):
            parameter = record.slots[0].param
            parameter.data = parameter.data.clone()
        assert all(
            record.param_data is not None for record in megatron_patches.iter_buffers(gpt.chunks)
        )


class RecordingAllocator:
    """Allocator of slices of a larger tensor per call, which records its calls."""

    def __init__(self, value: float = 0.0) -> None:
        self._value = value
        self.calls: list[tuple[int, torch.dtype, str, str]] = []
        self.tensors: list[torch.Tensor] = []

    def __call__(
        self, numel: int, dtype: torch.dtype, device: torch.device, kind: str
    ) -> torch.Tensor:
        self.calls.append((numel, dtype, device.type, kind))
        self.tensors.append(torch.full((numel + 64,), self._value, dtype=dtype, device=device)[64:])
        return self.tensors[-1]


def train_with_allocator(spec: GptSpec, allocator: RecordingAllocator | None) -> list[float]:
    megatron_patches.set_buffer_allocator(allocator)
    try:
        with running(spec) as gpt:
            records = megatron_patches.iter_buffers(gpt.chunks)
            losses = [gpt.train_step() for _ in range(3)]
            if allocator is not None:
                check_allocated(records, allocator)
            return losses
    finally:
        megatron_patches.set_buffer_allocator(None)


def check_allocated(records: list[BufferRecord], allocator: RecordingAllocator) -> None:
    """Check that Megatron's flat tensors are the allocated ones, in their order."""
    expected = []
    for record in records:
        for flat, kind in ((record.param_data, "param"), (record.grad_data, "grad")):
            if flat is not None:
                expected.append((flat, (flat.numel(), flat.dtype, "cpu", kind)))
    assert allocator.calls == [call for _, call in expected]
    assert all(
        tensor is allocated
        for (tensor, _), allocated in zip(expected, allocator.tensors, strict=True)
    )


@on_engines({2: ["experts", "replicated", "chunks"]})
def test_training_in_allocated_memory_is_bitwise_the_same(case: str) -> None:
    """Groups of patches are applied in both orders."""
    plain = train_with_allocator(SPECS[case], None)
    for order in (("hooks", "cpu"), ("cpu", "hooks")):
        megatron_patches.revert()
        for group in order:
            megatron_patches.apply([group])
        assert train_with_allocator(SPECS[case], RecordingAllocator()) == plain


@on_engines(2)
def test_wrong_tensors_of_an_allocator_are_refused() -> None:
    bad = {
        "63,": lambda numel, dtype, device, kind: torch.zeros(63, dtype=dtype),
        "float64": lambda numel, dtype, device, kind: torch.zeros(numel, dtype=torch.float64),
        "meta": lambda numel, dtype, device, kind: torch.zeros(numel, dtype=dtype, device="meta"),
        "False": lambda numel, dtype, device, kind: torch.zeros(2 * numel, dtype=dtype)[::2],
    }
    start(SHARDED)
    for message, allocate in bad.items():
        with (
            pytest.raises(errors.BufferAllocationError, match=message),
            megatron_patches.buffer_allocator(allocate),
        ):
            build(SHARDED)
    assert torch.overrides._get_current_function_mode_stack() == []
    stop()


def test_an_allocator_is_refused_while_patches_are_not_applied() -> None:
    with (
        pytest.raises(errors.BufferAllocationError, match=r"megatron_patches\.apply\(\)"),
        megatron_patches.buffer_allocator(RecordingAllocator()),
    ):
        pass
    megatron_patches.set_buffer_allocator(None)


def made_up_buffer(param_dtype: torch.dtype) -> Any:
    ddp_config = SimpleNamespace(use_distributed_optimizer=True)
    return SimpleNamespace(numel=4, nccl_ub=False, ddp_config=ddp_config, param_dtype=param_dtype)


def test_parameters_in_the_memory_of_gradients_need_one_flat_tensor() -> None:
    allocator = RecordingAllocator()
    with _Redirected(made_up_buffer(torch.uint8), allocator) as redirected:
        torch.zeros(4, dtype=torch.float32, device="cpu")
        redirected.check_complete()
    with _Redirected(made_up_buffer(torch.uint8), allocator) as redirected:
        torch.zeros(4, dtype=torch.uint8, device="cpu")
        with pytest.raises(
            errors.BufferAllocationError, match=r"\['param'\].*expected \['param', 'grad'\]"
        ):
            redirected.check_complete()
    assert [kind for *_, kind in allocator.calls] == ["grad", "param"]


def test_a_flat_tensor_of_unknown_kind_is_refused() -> None:
    with _Redirected(made_up_buffer(torch.float32), RecordingAllocator()) as redirected:
        for _ in ("param", "grad"):
            torch.zeros(4, dtype=torch.float32, device="cpu")
        redirected.check_complete()
        with pytest.raises(
            errors.BufferAllocationError, match=r"4 elements of torch\.float32.*'param', 'grad'"
        ):
            torch.zeros(4, dtype=torch.float32, device="cpu")


def test_a_bare_module_is_refused() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="chunk 0 is a Linear"):
        megatron_patches.iter_buffers([torch.nn.Linear(2, 2)])
