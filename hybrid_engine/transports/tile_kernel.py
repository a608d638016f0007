"""The CUDA kernel that copies tiles from a table of numbers; see runs.py. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_tiles(
    addresses,
    tiles,
    source_type: tl.constexpr,
    target_type: tl.constexpr,
    pack: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Copy one tile per program, casting. Numbers of a tile are in units of `pack` elements."""
    tile = tiles + tl.program_id(0) * 7
    run = addresses + tl.load(tile + 6) * 2
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns * pack)[None, :]
    is_inside = (row < tl.load(tile + 2)) & (column < tl.load(tile + 3) * pack)
    read = (tl.load(tile) + row * tl.load(tile + 4)) * pack + column
    written = (tl.load(tile + 1) + row * tl.load(tile + 5)) * pack + column
    # Without these hints, and the products with `pack`, threads would not move 16 bytes at a time.
    source = tl.load(run).to(tl.pointer_type(source_type))
    source = tl.multiple_of(source, pack * source_type.primitive_bitwidth // 8)
    target = tl.load(run + 1).to(tl.pointer_type(target_type))
    target = tl.multiple_of(target, pack * target_type.primitive_bitwidth // 8)
    values = tl.load(source + read, mask=is_inside)
    tl.store(target + written, values.to(target_type), mask=is_inside)
