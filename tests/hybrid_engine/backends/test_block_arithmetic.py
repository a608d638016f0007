"""Quantised elements and scales equal those of the libraries that write checkpoints, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.backends.block_arithmetic import (
    block_scales,
    elements,
    power_of_two,
    tensor_scale,
)
from hybrid_engine.models.block_quantization import (
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_OF_MODELOPT,
    BlockFormat,
    fp8,
)
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.zoo import block_formats

FORMATS = {"fp8": fp8(128, 128), "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}


def weights(dtype: torch.dtype, largest: float = 1e3) -> torch.Tensor:
    """Return a weight with blocks of zeros and of tiny, large, tied and signed values."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 384, generator=generator) * 0.02
    weight[:16] = 0
    weight[16:32] *= 1e-38
    weight[32:48] *= largest
    weight[48:64] = torch.tensor(
        [-0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25, 6.0, 7.0]
    ).repeat(32)
    # Every mantissa of bfloat16 as the largest magnitude of a block.
    weight[64:192, ::16] = (1 + torch.arange(128.0) / 128)[:, None]
    return weight.to(dtype)


def quantised(weight: torch.Tensor, form: BlockFormat) -> TensorDict:
    rows, columns = form.blocks.rows, form.blocks.columns
    largest = weight.float().abs().unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    tensors = {}
    of_tensor = None
    if form.tensor_scale is not None:
        of_tensor = tensor_scale(largest.max().view(1), form, form.tensor_scale)
        tensors[f"weight{form.tensor_scale.suffix}"] = of_tensor
    tensors[f"weight{form.scale_suffix}"], divisors = block_scales(largest, form, of_tensor)
    spread = divisors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    tensors[f"weight{form.values_suffix}"] = elements(weight.float() / spread, form)
    return tensors


def differing(method: str, form: BlockFormat, weight: torch.Tensor) -> list[str]:
    """Return the tensors that are not bitwise those of the method's writer of checkpoints."""
    expected = block_formats.quantised(method, weight)
    own = quantised(weight, form)
    assert own.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if (own[name].dtype, own[name].shape) != (tensor.dtype, tensor.shape)
        or not torch.equal(own[name].view(torch.uint8), tensor.view(torch.uint8))
    ]


BY_PUBLISHED_RECIPE = {"ue8m0": fp8(128, 128, powers_of_two=True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [1, 1e3, 1e30])
@pytest.mark.parametrize("method", FORMATS | BY_PUBLISHED_RECIPE)
def test_bits_are_those_of_the_writers_of_checkpoints(
    method: str, largest: float, dtype: torch.dtype
) -> None:
    weight = weights(dtype, largest)
    if dtype == torch.float16:
        weight = weight.nan_to_num(posinf=6e4, neginf=-6e4)
    assert differing(method, (FORMATS | BY_PUBLISHED_RECIPE)[method], weight) == []


@pytest.mark.parametrize("method", FORMATS)
def test_zeros_stay_zeros(method: str) -> None:
    zeros = torch.zeros(128, 128)
    expected = block_formats.quantised(method, zeros)
    for name, tensor in quantised(zeros, FORMATS[method]).items():
        assert torch.equal(tensor.float(), expected[name].float()), name
    of_modelopt = quantised(zeros, NVFP4_OF_MODELOPT)
    assert (of_modelopt["weight_scale"].float() == 1).all()
    assert of_modelopt["weight_scale_2"] == 0


def test_largest_magnitudes_need_no_clamp_in_e4m3() -> None:
    largest = torch.tensor([256.0, 447.0, 448.0, 449.0, 511.0, 2**-126, 3e38])
    scales = torch.exp2(power_of_two(largest, 8).double() - 127)
    assert (largest / scales < 448).all()
    assert power_of_two(largest, 8)[:4].tolist() == [127, 127, 128, 128]


def test_nvfp4_of_modelopt_is_by_its_formulas() -> None:
    """Those of ModelOpt 0.47, which was run beside this project: see docs/trainers.md."""
    weight = weights(torch.bfloat16)
    own = quantised(weight, NVFP4_OF_MODELOPT)
    expected = block_formats.quantised("modelopt", weight)
    assert own.keys() == expected.keys()
    for name in ("weight_scale", "weight_scale_2"):
        assert torch.equal(own[name].view(torch.uint8), expected[name].view(torch.uint8))
    # A zero may have a sign.
    assert torch.equal(
        block_formats._unpacked(own["weight"]), block_formats._unpacked(expected["weight"])
    )
