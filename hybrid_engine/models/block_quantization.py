"""Weights quantised in blocks: element formats, scales and names of published checkpoints.

    format           element   scale of a block                                 tensor's scale
    fp8              e4m3      128 x 128: float32, largest |w| / 448            none
                               or the next power of two (DeepSeek-V3.1)
    mxfp8            e4m3      1 x 32: power of two, `power_of_two`             none
    mxfp4            e2m1      1 x 32: power of two                             none
    nvfp4            e2m1      1 x 16: e4m3, (largest |w| of the block / 6)     float32
                               in units of the tensor's scale

A power of two is stored as its exponent + 127, in a byte (e8m0). Two elements of e2m1 share a byte,
the first in the low bits. Sources: OCP Microscaling Formats (MX) 1.0, and the quantisers that write
such checkpoints for vLLM: DeepSeek-V3's, compressed-tensors, NVIDIA ModelOpt. Pure: this module
computes names, shapes and regions, and backends/block_arithmetic.py the values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_engine.errors import (
    ConfigError,
    Violation,
    require_none,
)
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.regions import Region, Shape, Shapes


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """Format of the elements of a quantised weight.

    Attributes:
        dtype: dtype in which they are stored.
        largest: largest value.
        per_byte: elements in a byte.
    """

    dtype: str
    largest: float
    per_byte: int

    @property
    def exponent(self) -> int:
        """Exponent of the largest value: floor(log2(largest))."""
        # 448 = 1.75 * 2**8 and 6 = 1.5 * 2**2.
        return {448.0: 8, 6.0: 2}[self.largest]


E4M3 = ElementFormat("float8_e4m3fn", 448.0, 1)
E2M1 = ElementFormat("uint8", 6.0, 2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Size of a block, in elements."""

    rows: int
    columns: int

    def grid(self, shape: Shape) -> Shape:
        """Return the number of blocks along each dim of a weight."""
        rows, columns = shape
        # A weight of 300 rows has 3 rows of blocks of 128; the last covers 44 rows.
        return (-(-rows // self.rows), -(-columns // self.columns))

    def touched(self, region: Region) -> Region:
        """Return the numbers of all blocks that have an element in a region of a weight."""
        sizes = (self.rows, self.columns)
        bounds = zip(region.offsets, region.ends, sizes, strict=True)
        # Rows 100 to 199 with blocks of 128 rows touch blocks 0 and 1.
        spans = [(low // size, -(-end // size)) for low, end, size in bounds]
        offsets = tuple(start for start, _ in spans)
        lengths = tuple(stop - start for start, stop in spans)
        return Region(region.tensor, offsets, lengths)

    def weights_of(self, blocks: Region, shape: Shape) -> Region:
        """Return the region of a weight of this shape that some of its blocks cover."""
        sizes = (self.rows, self.columns)
        offsets = tuple(low * size for low, size in zip(blocks.offsets, sizes, strict=True))
        bounds = zip(blocks.ends, sizes, shape, strict=True)
        # The last block may be cut short: of 300 rows, block 2 has 256 to 299.
        ends = tuple(min(end * size, whole) for end, size, whole in bounds)
        lengths = tuple(end - low for low, end in zip(offsets, ends, strict=True))
        return Region(blocks.tensor, offsets, lengths)


@dataclass(frozen=True, slots=True)
class TensorScale:
    """Scale of a whole tensor, by which vLLM multiplies or divides the scales of its blocks.

    Attributes:
        suffix: its name, after the weight's.
        divides: it is stored as 448 * 6 / largest |w|, by which vLLM divides; else as the inverse.
        of_zeros: scale of a block of zeros.
        smallest: smallest scale of another block.
    """

    suffix: str
    divides: bool
    of_zeros: float
    smallest: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of a quantised weight and its scales, as vLLM loads them from a checkpoint.

    Attributes:
        method: value of `generate_config.quantization`.
        element: format of the elements.
        blocks: size of a block.
        scale: dtype of the scales of blocks; uint8 for powers of two.
        scale_suffix: name of the scales, after the weight's.
        values_suffix: name of the elements, after the weight's.
        tensor_scale: scale of the whole tensor, if it has one. Weights that vLLM fuses share it.
        powers_of_two: scales in float32 are powers of two (`scale_fmt: ue8m0`).
    """

    method: str
    element: ElementFormat
    blocks: Blocks
    scale: Literal["float32", "uint8", "float8_e4m3fn"]
    scale_suffix: str
    values_suffix: str = ""
    tensor_scale: TensorScale | None = None
    powers_of_two: bool = False

    def values_of(self, region: Region) -> Region:
        """Return the place of a weight's elements in the stored tensor.

        Raises ConfigError if only one of two elements in a byte is in the region.
        """
        name = region.tensor + self.values_suffix
        per_byte = self.element.per_byte
        row, column = region.offsets
        height, width = region.lengths
        # A byte of two elements belongs to one rank or to none.
        if column % per_byte or width % per_byte:
            problem = (
                f"{self.method}, but a rank has columns {column} to {column + width} of "
                f"{region.tensor}, and two columns share a byte"
            )
            remedy = "Use other parallel sizes in training"
            key = "generate_config.quantization"
            raise ConfigError.of(key, problem, remedy, code="cut-in-a-byte")
        return Region(name, (row, column // per_byte), (height, width // per_byte))

    def scales_of(self, region: Region) -> Region:
        """Return the scales of all blocks that have an element in a region of a weight."""
        blocks = self.blocks.touched(region)
        return replace(blocks, tensor=region.tensor + self.scale_suffix)

    def tensors_of(self, weight: str, shape: Shape) -> dict[str, tuple[Shape, str]]:
        """Return the stored tensors of a weight: name -> (shape, dtype)."""
        rows, columns = shape
        values = (rows, columns // self.element.per_byte)
        tensors = {
            weight + self.values_suffix: (values, self.element.dtype),
            weight + self.scale_suffix: (self.blocks.grid(shape), str(self.scale)),
        }
        if self.tensor_scale is not None:
            tensors[weight + self.tensor_scale.suffix] = ((1,), "float32")
        return tensors


def fp8(rows: int, columns: int, *, powers_of_two: bool = False) -> BlockFormat:
    """Return the format of DeepSeek's and Qwen3's fp8 checkpoints, in blocks of this size."""
    blocks = Blocks(rows, columns)
    return BlockFormat("fp8", E4M3, blocks, "float32", "_scale_inv", powers_of_two=powers_of_two)


MXFP8 = BlockFormat("mxfp8", E4M3, Blocks(1, 32), "uint8", "_scale")
MXFP4 = BlockFormat("mxfp4", E2M1, Blocks(1, 32), "uint8", "_scale", "_packed")
NVFP4 = BlockFormat(
    *("nvfp4", E2M1, Blocks(1, 16), "float8_e4m3fn", "_scale", "_packed"),
    TensorScale("_global_scale", divides=True, of_zeros=0.125),
)
"""As compressed-tensors writes it."""
NVFP4_OF_MODELOPT = BlockFormat(
    *("nvfp4", E2M1, Blocks(1, 16), "float8_e4m3fn", "_scale", ""),
    TensorScale("_scale_2", divides=False, of_zeros=1.0, smallest=2.0**-9),
)

BLOCK_METHODS = tuple(form.method for form in (fp8(128, 128), MXFP8, MXFP4, NVFP4))
"""Values of `generate_config.quantization` for weights that are quantised before they are sent."""


@dataclass(frozen=True, eq=False)
class BlockQuantization:
    """Canonical tensors of a model that are served in blocks.

    Attributes:
        weights: name of each quantised weight -> name of its group, the weights that vLLM fuses
            with it. A group has one tensor-wide scale.
        format: format of all of them.
    """

    weights: Mapping[str, str]
    format: BlockFormat

    def served(self, table: ModelTable) -> ModelTable:
        """Return the table with stored tensors and their dtypes in place of quantised weights."""
        shapes: dict[str, Shape] = {}
        dtypes = dict(table.dtypes)
        for name, shape in table.shapes.items():
            if name not in self.weights:
                shapes[name] = shape
                continue
            # The name of the elements may be the weight's own (fp8), and gets its dtype below.
            dtypes.pop(name, None)
            for stored, (of_stored, dtype) in self.format.tensors_of(name, shape).items():
                shapes[stored] = of_stored
                dtypes[stored] = dtype
        return replace(table, shapes=shapes, dtypes=dtypes)


def require_matrices(names: Collection[str], shapes: Shapes, form: BlockFormat) -> None:
    """Raise ConfigError naming every tensor that has no rows of whole blocks.

    Fused experts have no rows and columns. A last block of fewer rows is allowed, and with fp8 one
    of fewer columns.
    """
    violations = []
    for name in sorted(names):
        shape = shapes[name]
        problem = ""
        if len(shape) != 2:
            problem = f"{name} has shape {shape}, not rows and columns"
        elif form.blocks.rows == 1 and shape[1] % form.blocks.columns:
            problem = f"{name} has {shape[1]} columns, no multiple of {form.blocks.columns}"
        if problem:
            violations.append(
                Violation(
                    "generate_config.quantization",
                    f"{form.method} in blocks, but {problem}",
                    "Set it to none, or exclude its module in config.json's quantization_config",
                    code="not-a-matrix",
                )
            )
    require_none(violations)
