"""Contents of Transformer Engine's quantised parameters, and reasons why they cannot be read; the
tensors are made up.

end_to_end/test_fp8_parameters.py trains with them and sends them to vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_engine.backends.megatron import quantised_parameters
from hybrid_engine.backends.megatron.quantised_parameters import (
    backward_items,
    is_quantised,
    stored_blocks,
    unreadable_parameters,
)
from tests.zoo import made_up_fp8
from tests.zoo.made_up_fp8 import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor, QuantizedTensor

CLASSES = (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor)


def parameter(
    kind: type[QuantizedTensor], rows: int = 300, columns: int = 192, **changes: Any
) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator)
    values[:128, :128] = 0
    values[5, 150] = -1e4
    made = torch.nn.Parameter(kind.of(values))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("shape", [(300, 192), (256, 512), (40, 544)])
def test_dequantised_values_are_those_of_the_tensor(
    kind: type[QuantizedTensor], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_parameters, "_ROWS_AT_ONCE", 100)  # within blocks of 128
    weight = parameter(kind, *shape)
    stored = stored_blocks(weight)
    values = torch.empty(shape, dtype=torch.bfloat16)
    stored.dequantise_into(values)
    assert torch.equal(values, weight.detach().dequantize())
    assert tuple(stored.scales.shape) == stored.blocks.grid(shape)
    # Views of the parameter's own memory.
    assert stored.elements.data_ptr() == getattr(weight, kind.elements_name).data_ptr()
    assert stored.scales.data_ptr() == getattr(weight, kind.scales_name).data_ptr()


def test_other_tensors_are_not_quantised() -> None:
    assert not is_quantised(torch.nn.Parameter(torch.zeros(2, 2)))
    assert not is_quantised(torch.zeros(2, dtype=torch.uint8))
    assert unreadable_parameters([("norm.weight", torch.nn.Parameter(torch.zeros(2)))]) == []


def grouped() -> torch.Tensor:
    class GroupedTensor(torch.Tensor): ...

    tensor = torch.zeros(4).as_subclass(GroupedTensor)
    tensor.rowwise_data = torch.zeros(4, dtype=torch.uint8)
    return tensor


def of_nvfp4() -> torch.Tensor:
    class NVFP4Tensor(QuantizedTensor):
        quantizer = object

    return NVFP4Tensor((128, 128))


UNREADABLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "delayed scaling": (
        lambda: parameter(Float8Tensor, _quantizer=made_up_fp8.Float8Quantizer()),
        "of Float8Quantizer: with delayed scaling, replicas may differ in their scales",
    ),
    "no quantizer": (lambda: parameter(Float8Tensor, _quantizer=None), "of NoneType"),
    "columns only": (
        lambda: parameter(MXFP8Tensor, _rowwise_data=None, _rowwise_scale_inv=None),
        "a MXFP8Tensor without _rowwise_data and _rowwise_scale_inv",
    ),
    "no scales": (
        lambda: parameter(Float8BlockwiseQTensor, _rowwise_scale_inv=None),
        "a Float8BlockwiseQTensor without _rowwise_data and _rowwise_scale_inv",
    ),
    "swizzled": (
        lambda: parameter(MXFP8Tensor, _with_gemm_swizzled_scales=True),
        "a MXFP8Tensor with swizzled scales",
    ),
    "rows of 128": (
        lambda: parameter(Float8BlockwiseQTensor, _is_2D_scaled=False),
        "a Float8BlockwiseQTensor with blocks of 1 x 128",
    ),
    "e5m2": (
        lambda: parameter(MXFP8Tensor, _fp8_dtype=made_up_fp8.DType.kFloat8E5M2),
        "a MXFP8Tensor with elements in DType.kFloat8E5M2, not e4m3",
    ),
    "too few scales": (
        lambda: parameter(Float8BlockwiseQTensor, _rowwise_scale_inv=torch.ones(1, 4)),
        "a Float8BlockwiseQTensor with scales of shape (1, 4) for 3 x 2 blocks",
    ),
    "several experts": (
        grouped,
        "a GroupedTensor, not a Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor",
    ),
    "nvfp4": (of_nvfp4, "a NVFP4Tensor, not a Float8Tensor"),
}


def test_all_parameters_that_cannot_be_read_are_reported_at_once() -> None:
    named = [(f"{name}.weight", make()) for name, (make, _) in UNREADABLE.items()]
    named += [(f"readable {kind.__name__}", parameter(kind)) for kind in CLASSES]
    named += [(f"{number}.to_wrap.weight", parameter(MXFP8Tensor)) for number in range(3)]
    violations = unreadable_parameters(named)
    assert {violation.code for violation in violations} == {"unreadable-fp8-parameters"}
    assert {violation.key for violation in violations} == {"TransformerConfig.fp8_param"}
    problems = [violation.problem for violation in violations]
    assert len(problems) == len(UNREADABLE) + 1
    for name, (_, reason) in UNREADABLE.items():
        (problem,) = (problem for problem in problems if f"first {name}.weight" in problem)
        assert reason in problem
    # A reason is reported once for all parameters.
    assert "LoRA on a weight in 8 bits: 3 parameters, first 0.to_wrap.weight" in problems


@pytest.mark.parametrize("kind", CLASSES)
def test_copies_for_the_backward_pass_can_leave_the_device(kind: type[QuantizedTensor]) -> None:
    weight = parameter(kind)
    (item,) = backward_items([("w", weight)])
    copies = getattr(weight, kind.copies_name)
    assert item.tensor is copies
    # MXFP8's elements along columns are not the transpose of those along rows, so they are kept.
    assert item.action == ("copy" if kind is MXFP8Tensor else "rebuild")
    if item.forget is not None:
        item.forget()
        assert getattr(weight, kind.copies_name) is None
        assert getattr(weight, "_transpose_invalid", True)
        assert [*backward_items([("w", weight)])] == []
