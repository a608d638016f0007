"""Arithmetic of weights in blocks: scales of blocks, and elements divided by them.

All in float32, whose operations are those of the quantisers that write checkpoints, in their order:
the bits are theirs (tests/hybrid_engine/backends/test_block_arithmetic.py). Elementwise, so a
tensor may be quantised in parts.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from hybrid_engine.models.block_quantization import BlockFormat, TensorScale

_E8M0_BIAS = 127
_ROUNDED_UP = 1.75
"""Mantissa from which the largest magnitude of a block is rounded up to the next power of two. Then
no element of e4m3, which ends at 1.75 * 2**8, needs to be clamped."""

_SMALLEST = 1e-4
"""Smallest largest magnitude of a block from which DeepGEMM derives a power of two."""


def tensor_scale(largest: torch.Tensor, form: BlockFormat, scale: TensorScale) -> torch.Tensor:
    """Return the stored scale of a tensor, [1], from its largest magnitude, [1]."""
    end = torch.finfo(getattr(torch, form.scale)).max * form.element.largest
    if not scale.divides:
        return largest / end
    smallest = torch.finfo(torch.float32).tiny
    # A tensor of zeros overflows, and needs no scale.
    return torch.nan_to_num(end / largest.clamp(min=smallest), nan=1.0, posinf=1.0, neginf=1.0)


def block_scales(
    largest: torch.Tensor,
    form: BlockFormat,
    of_tensor: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scales of blocks, and the divisors of their elements in float32.

    Args:
        largest: largest magnitude of each block, float32.
        form: the format.
        of_tensor: stored scale of the whole tensor, [1], if the format has one.
    """
    if form.tensor_scale is not None:
        assert of_tensor is not None
        dtype = getattr(torch, form.scale)
        if form.tensor_scale.divides:
            units = of_tensor * (largest / form.element.largest)
        else:
            units = largest / (form.element.largest * of_tensor)
        of_zeros = torch.full_like(units, form.tensor_scale.of_zeros)
        units = torch.where(units > 0, units, of_zeros)  # NaN if all of the tensor is zero
        rounded = units.clamp(form.tensor_scale.smallest, torch.finfo(dtype).max).to(dtype).float()
        rounded = torch.where(rounded == 0, of_zeros, rounded)
        divisors = rounded / of_tensor if form.tensor_scale.divides else rounded * of_tensor
        return rounded.to(dtype), divisors
    if form.powers_of_two:
        # Largest 1000 of e4m3, which ends at 448: log2(2.23) = 1.16, so the scale is 4.
        exponents = (largest.clamp(min=_SMALLEST) / form.element.largest).log2().ceil()
        scales = torch.pow(2.0, exponents)
        return scales, scales
    if form.scale == "float32":
        scales = largest / form.element.largest
        # The scale of a block of zeros, or of values too small for a scale, changes nothing.
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        return scales, scales
    stored = power_of_two(largest, form.element.exponent)
    return stored, factors_of(stored)


def factors_of(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks in float32; uint8 holds powers of two."""
    if scales.dtype is not torch.uint8:
        return scales.float()
    ones = torch.ones(scales.shape, device=scales.device)
    return torch.ldexp(ones, scales.int() - _E8M0_BIAS)


def power_of_two(largest: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return the scale of each block as e8m0, uint8.

    The block's largest magnitude, rounded down to a power of two, or up from `_ROUNDED_UP`, over
    2**exponent.
    """
    # 1000 is 0.977 * 2**10, rounded up to 2**10. Over 2**8 for e4m3: 4, stored as 2 + 127.
    mantissa, above = torch.frexp(largest)  # mantissa in [0.5, 1)
    rounded = above - 1 + (mantissa >= _ROUNDED_UP / 2)
    stored = (rounded - exponent + _E8M0_BIAS).clamp(0, 254)
    return torch.where(largest > 0, stored, torch.zeros_like(stored)).to(torch.uint8)


def elements(quotients: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Return weights divided by their divisors, rounded to nearest even in the element format.

    `quotients` is [rows, columns] in float32; the result is [rows, columns / per_byte].
    """
    if form.element.per_byte == 1:
        return quotients.to(getattr(torch, form.element.dtype))
    bounds = _bounds().to(quotients.device)
    # 2.6 lies above 0.25, 0.75, 1.25, 1.75 and 2.5: code 5, which is 3. Bit 3 is the sign; the
    # first of two elements has the low bits of the byte.
    codes = torch.bucketize(quotients.abs().contiguous(), bounds, out_int32=True).to(torch.uint8)
    codes |= (quotients < 0).to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def _bounds() -> torch.Tensor:
    """Return the largest magnitudes that round to the values of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4.

    Between two values, the middle belongs to the one whose last bit is zero.
    """
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    bounds = torch.tensor([(low + high) / 2 for low, high in pairwise(values)])
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(()))
    return bounds
