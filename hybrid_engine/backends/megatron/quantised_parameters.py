"""Parameters that Transformer Engine keeps in 8 bits (`fp8_param`): their elements and scales.

    class                     elements, e4m3    scales
    Float8Tensor              _data             _scale_inv: float32, one for all rows and columns
    Float8BlockwiseQTensor    _rowwise_data     _rowwise_scale_inv: float32, 128 x 128
    MXFP8Tensor               _rowwise_data     _rowwise_scale_inv: power of two (e8m0), 1 x 32

A weight is elements times scales. Scales in blocks may be padded at the ends of both dims. The
optimizer quantises again at every step; Float8BlockwiseQTensor and Float8Tensor are transposed for
the backward pass when needed, MXFP8Tensor has other elements for it, which no inference reads.

Classes are known by name, because Transformer Engine is imported by Megatron alone. Read in its
sources of versions 2.0 to 2.20; tests use made-up tensors of the same names and layouts. Not run
with Transformer Engine itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.block_arithmetic import factors_of
from hybrid_engine.backends.computed_sources import ComputedSources, StoredScales
from hybrid_engine.backends.megatron.adapted_weights import WRAPPED
from hybrid_engine.backends.training_side import NamedTensor, dtype_name
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import Violation
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.models.block_quantization import BlockFormat, Blocks
from hybrid_engine.records.layout import Shard

_PER_TENSOR, _BLOCKWISE, _MICROSCALED = "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor"

_ATTRIBUTES = {
    _PER_TENSOR: ("_data", "_scale_inv"),
    _BLOCKWISE: ("_rowwise_data", "_rowwise_scale_inv"),
    _MICROSCALED: ("_rowwise_data", "_rowwise_scale_inv"),
}
"""Class -> attributes of the elements, uint8, and of their scales."""


_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class StoredBlocks:
    """Contents of a quantised parameter.

    Attributes:
        elements: [rows, columns], float8_e4m3fn; the parameter's memory.
        scales: one for each block, without padding; float32, or uint8 for powers of two.
        blocks: size of a block.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    blocks: Blocks

    def dequantise_into(self, values: torch.Tensor) -> None:
        """Write elements times scales, multiplied in float32, as Transformer Engine does."""
        rows, columns = self.elements.shape
        factors = factors_of(self.scales)
        of_column = torch.arange(columns, device=factors.device) // self.blocks.columns
        # Some rows at a time, because copies in float32 take memory.
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = self.elements[start : start + _ROWS_AT_ONCE].float()
            numbers = torch.arange(start, start + len(part), device=factors.device)
            part *= factors[numbers // self.blocks.rows][:, of_column]
            values[start : start + len(part)].copy_(part)


def is_quantised(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of Transformer Engine that holds elements and scales."""
    names = {base.__name__ for base in type(tensor).__mro__}
    # A GroupedTensor may hold 16-bit elements as well; only bytes are quantised.
    if "GroupedTensor" in names:
        elements = getattr(tensor, "rowwise_data", None)
        return isinstance(elements, torch.Tensor) and elements.dtype is torch.uint8
    return bool(names & {"QuantizedTensor", *_ATTRIBUTES})


def stored_blocks(tensor: torch.Tensor) -> StoredBlocks:
    """Return the contents of a quantised parameter as they are now.

    Raises ValueError with the reason if they cannot be read.
    """
    kind = _kind(tensor)
    elements, scales = (getattr(tensor, name, None) for name in _ATTRIBUTES[kind])
    if not isinstance(elements, torch.Tensor) or not isinstance(scales, torch.Tensor):
        names = " and ".join(_ATTRIBUTES[kind])
        raise ValueError(f"a {kind} without {names}: it has elements for the backward pass only")
    if elements.dim() != 2 or not elements.is_contiguous():
        raise ValueError(f"a {kind} whose elements are not contiguous rows and columns")
    rows, columns = elements.shape
    if kind == _PER_TENSOR:
        return StoredBlocks(_e4m3(elements), scales.view(1, 1), Blocks(rows, columns))
    blocks = Blocks(128, 128) if kind == _BLOCKWISE else Blocks(1, 32)
    height, width = blocks.grid((rows, columns))
    if scales.dim() != 2 or scales.shape[0] < height or scales.shape[1] < width:
        shape = tuple(scales.shape)
        raise ValueError(f"a {kind} with scales of shape {shape} for {height} x {width} blocks")
    # Without the padding, which Transformer Engine adds for its kernels.
    return StoredBlocks(_e4m3(elements), scales[:height, :width], blocks)


def unreadable_parameters(named: Iterable[NamedTensor]) -> list[Violation]:
    """Return a violation for each reason why quantised parameters cannot be read."""
    findings: dict[str, list[str]] = {}
    for name, tensor in named:
        if is_quantised(tensor):
            for reason in _reasons(tensor):
                findings.setdefault(reason, []).append(name)
            if WRAPPED in name:
                findings.setdefault("LoRA on a weight in 8 bits", []).append(name)
    key = "TransformerConfig.fp8_param"
    remedy = "Use fp8_recipe blockwise, tensorwise or mxfp8, or turn fp8_param off"
    return [
        Violation(key, problem, remedy, code="unreadable-fp8-parameters")
        for problem in _problems(findings)
    ]


def not_sent_as_stored(findings: Mapping[str, Collection[str]]) -> list[Violation]:
    """Return a violation for each reason of `scales_of`, given the names of the parameters."""
    key = "generate_config.quantization"
    remedy = f"Use the format of training's weights, or {UNQUANTISED}, which dequantises them"
    return [
        Violation(key, problem, remedy, code="other-fp8-parameters")
        for problem in _problems(findings)
    ]


def _problems(findings: Mapping[str, Collection[str]]) -> Iterator[str]:
    for reason, names in findings.items():
        yield f"{reason}: {len(names)} parameters, first {next(iter(names))}"


def _reasons(tensor: torch.Tensor) -> Iterator[str]:
    """Yield the reasons why a quantised parameter cannot be read."""
    try:
        kind = _kind(tensor)
        stored_blocks(tensor)
    except ValueError as error:
        yield str(error)
        return
    element = getattr(tensor, "_fp8_dtype", None)
    # Transformer Engine's own enumeration.
    if not getattr(element, "name", str(element)).endswith("E4M3"):
        yield f"a {kind} with elements in {element}, not e4m3"
    if kind == _PER_TENSOR:
        quantizer = type(getattr(tensor, "_quantizer", None)).__name__
        if quantizer != "Float8CurrentScalingQuantizer":
            yield (
                f"a {kind} of {quantizer}: with delayed scaling, replicas may differ in their "
                "scales, which each rank derives from a history"
            )
    if kind == _BLOCKWISE and not getattr(tensor, "_is_2D_scaled", False):
        yield f"a {kind} with blocks of 1 x 128, for which vLLM has no format"
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        yield f"a {kind} with swizzled scales"


def set_elements(tensor: torch.Tensor, elements: torch.Tensor) -> None:
    """Have a quantised parameter keep its elements, uint8, in other memory with equal contents."""
    setattr(tensor, _ATTRIBUTES[_kind(tensor)][0], elements)


def as_elements(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat buffer in its dtype; bytes are elements of quantised parameters."""
    return flat.view(torch.float8_e4m3fn) if flat.dtype is torch.uint8 else flat


def scales_of(weight: torch.Tensor, shard: Shard, start: int, form: BlockFormat) -> StoredScales:
    """Return the scales of a part of a quantised parameter.

    Args:
        weight: the parameter.
        shard: the part, where it is stored.
        start: first element of the parameter in its flat buffer.
        form: format of the tensors that are sent.

    Raises ValueError with the reason if the parameter's elements or scales have another format.
    """
    stored = stored_blocks(weight)
    if (form.element.dtype, form.scale) != ("float8_e4m3fn", dtype_name(stored.scales)):
        raise ValueError(f"{form.method}, but training has a {_kind(weight)}")
    _, num_columns = stored.elements.shape
    # In a parameter of 64 columns, an offset of 130 is row 2, column 2.
    row, column = divmod(shard.place.offset - start, num_columns)
    # Every row has a stride of 64, every second one of 128. Any other stride does not step
    # by whole rows.
    row_step, remainder = divmod(shard.place.strides[0], num_columns)
    if len(shard.region.lengths) != 2 or remainder or shard.place.strides[1] != 1:
        raise ValueError(f"{form.method}, but training has a {_kind(weight)} in another order")
    height, width = shard.region.lengths
    rows = (row + row_step * torch.arange(height)) // stored.blocks.rows
    columns = (column + torch.arange(width)) // stored.blocks.columns
    return StoredScales(shard.region, weight, rows, columns, lambda: stored_blocks(weight).scales)


def backward_items(named: Iterable[NamedTensor]) -> Iterator[OffloadItem]:
    """Yield the elements of quantised parameters that only the backward pass reads.

    Transposes are forgotten, and made again by the next backward pass.
    """
    for name, tensor in named:
        kind = _kind(tensor)
        attribute = "_transpose" if kind == _PER_TENSOR else "_columnwise_data"
        elements = getattr(tensor, attribute, None)
        if elements is None:
            continue
        owner = f"{name}.{attribute}"
        if kind == _MICROSCALED:
            yield OffloadItem(owner, "param", elements)
        else:
            yield OffloadItem(
                owner, "param", elements, "rebuild", partial(_forget, tensor, attribute)
            )


def _forget(tensor: Any, attribute: str) -> None:
    setattr(tensor, attribute, None)
    if attribute == "_transpose":
        tensor._transpose_invalid = True


def dequantised_weights(weights: Iterable[torch.Tensor]) -> ComputedSources[torch.Tensor]:
    """Return dequantised copies of quantised parameters, by parameter, in scratch memory."""
    shapes = {
        weight: torch.empty(tuple(weight.shape), dtype=weight.dtype, device="meta")
        for weight in weights
    }

    def compute(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for weight, value in values.items():
            stored_blocks(weight).dequantise_into(value)

    device = next(iter(shapes)).device
    return ComputedSources("dequantised weights", shapes, device, compute)


def _kind(tensor: torch.Tensor) -> str:
    """Return the class that decides the layout; raises ValueError for another class."""
    for base in type(tensor).__mro__:
        if base.__name__ in _ATTRIBUTES:
            return base.__name__
    classes = ", ".join(_ATTRIBUTES)
    raise ValueError(f"a {type(tensor).__name__}, not a {classes}")


def _e4m3(elements: torch.Tensor) -> torch.Tensor:
    return elements.detach().view(torch.float8_e4m3fn)
