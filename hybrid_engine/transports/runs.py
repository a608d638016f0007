"""Runs: equal boxes at equal distances, copied by views of torch or, on a GPU, by tiles.

    transfers --> runs: transfers with one dim more, which may descend in the source
    a run     --> a view on either side, cut into its boxes if the source descends
    runs      --> tiles: a table of numbers on the GPU, made once; a kernel copies one per program
    addresses --> a table, made again if one has changed

Runs pay off for experts: Megatron's buffers hold the last expert first, vLLM's the first. The
kernel is launched once for the tiles that permit 16 bytes at a time, and once for those that do
not: for each size of elements, and for each pair of dtypes that is cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from hybrid_engine.planning.coalescing import join_regular
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import BufferId, Place

Flats = Mapping[BufferId, torch.Tensor]

# Most bytes that a thread of a GPU moves at once.
_WIDE_NBYTES = 16
# Most rows and units of a tile: 64 KB in units of 16 bytes, with rows of 128 bytes.
_ROWS = 512
_COLUMNS = 8
_NUM_WARPS = 16
# Dtypes that the kernel casts, by Triton's names. Others are copied as integers.
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Origin(NamedTuple):
    """Position of a flat buffer: `offset` elements from the start of the storage of this number.

    Its address is `shift` elements beyond a multiple of 16 bytes.
    """

    storage: int
    offset: int
    dtype: torch.dtype
    shift: int = 0
    device: torch.device = torch.device("cpu")


Origins = Mapping[BufferId, Origin]


def origins_of(flats: Flats) -> Origins:
    """Return the origins of flat buffers."""
    # Storages are numbered, because staging memory has another address at every switch.
    numbers: dict[int, int] = {}
    origins = {}
    for buffer, flat in flats.items():
        address = flat.data_ptr()
        offset = int(flat.storage_offset())
        itemsize = flat.element_size()
        number = numbers.setdefault(address - offset * itemsize, len(numbers))
        # In bfloat16 an address of 8 bytes beyond a multiple of 16 has a shift of 4.
        shift = address % _WIDE_NBYTES // itemsize
        origins[buffer] = Origin(number, offset, flat.dtype, shift, flat.device)
    return origins


def runs_of(transfers: Iterable[Transfer], origins: Origins) -> list[Transfer]:
    """Combine transfers into runs; `origins` are those of the buffers that they read."""

    def source_of(transfer: Transfer) -> tuple[object, int]:
        # Buffers of one storage can share a view.
        origin = origins[transfer.src.buffer]
        return (origin.storage, origin.dtype), origin.offset + transfer.src.offset

    return join_regular(transfers, source_of, backwards=True)


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """Return the box of `lengths` at `place` of a flat buffer as a view, in elements."""
    return flat.as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


def view_of(
    buffers: Mapping[str, torch.Tensor], lengths: tuple[int, ...], place: Place
) -> torch.Tensor:
    """Return the box of `lengths` at `place` of a rank's flat buffers, by name; without grad."""
    return strided(buffers[place.buffer.name].detach(), lengths, place)


def views_of(
    run: Transfer, sources: Flats, destinations: Flats
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return views of a run's boxes, in the destination and in the source."""
    source = sources[run.src.buffer]
    destination = destinations[run.dst.buffer]
    into = strided(destination, run.lengths, run.dst)
    first, *strides = run.src.strides or (0,)
    if first >= 0:
        return [into], [strided(source, run.lengths, run.src)]
    # torch has no negative strides: from the last box, which is the lowest.
    # Boxes at 20, 10 and 0 are a view from 0 with a step of 10, its boxes in reverse.
    start = run.src.offset + first * (run.lengths[0] - 1)
    lowest = Place(run.src.buffer, start, (-first, *strides))
    return into.unbind(), strided(source, run.lengths, lowest).unbind()[::-1]


def tiles_of(
    number: int, run: Transfer, source: Origin, target: Origin
) -> tuple[tuple[str, str, int], np.ndarray]:
    """Cut a run into tiles.

    Returns the types of the elements, the elements of a unit, and int64 [tiles, 7]: offset in the
    source and in the destination, rows until the run's end, length of a row, distance of rows in
    the source and in the destination, number of the run. Offsets, length and distances are in
    units.
    """
    dtypes = (source.dtype, target.dtype)
    source_type, target_type = (_TYPES.get(dtype, f"int{8 * dtype.itemsize}") for dtype in dtypes)
    dims = list(zip(run.lengths, run.src.strides, run.dst.strides, strict=True))
    width = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    # Row 0 is there for the check only: all but counts of rows must be whole units. Of two shifts
    # the bitwise or has a remainder if either has, as `pack` is a power of 2.
    others = (0, width, source.shift | target.shift)
    places = np.array([others, (width, run.src.offset, run.dst.offset), *dims])
    pack = _WIDE_NBYTES // max(dtype.itemsize for dtype in dtypes)
    if (places[:, 1:] % pack).any():
        pack = 1
    # A tile has rows of `columns` units, and as many rows as fit along the longest dim.
    units, *start = places[1] // pack
    # The largest power of 2 in `units`, at most 8: rows of 24 units have 8 columns, of 20 have 4.
    # What is wider becomes a further dim of strips.
    columns = min(units & -units, _COLUMNS)
    # 1,000 rows of 16 units: dims of 1,000 rows and 2 strips. Rows are cut at 512, so there are 2 *
    # 2 tiles, the later ones with 488 rows.
    steps = np.array([*(places[2:] // (1, pack, pack)), (units // columns, columns, columns)])
    longest = steps[:, 0].argmax()
    height, *distances = steps[longest]
    steps[longest] = (-(-height // _ROWS), *np.multiply(distances, _ROWS))
    index = np.argwhere(np.ones(steps[:, 0], dtype=bool))
    offsets = start + index @ steps[:, 1:]
    rows = height - _ROWS * index[:, longest]
    rest = np.full((len(index), 4), (columns, *distances, number))
    kind = (source_type, target_type, pack)
    if pack > 1 and dtypes[0] == dtypes[1]:
        kind = ("int64", "int64", 2)  # bytes of any dtype
    return kind, np.column_stack((offsets, rows, rest))


class TiledCopies:
    """Copies of runs within a GPU. Only numbers are kept.

    Attributes:
        tiles: by class (see `tiles_of`), their table.
    """

    def __init__(self, runs: Sequence[Transfer], ends: Sequence[tuple[Origin, Origin]]) -> None:
        """Make the tables, which take about 0.1 % of the copied bytes; `ends` are of each run."""
        self._runs = runs
        self._device = ends[0][0].device
        parts: dict[tuple[str, str, int], list[np.ndarray]] = {}
        for number, (run, pair) in enumerate(zip(runs, ends, strict=True)):
            kind, tiles = tiles_of(number, run, *pair)
            parts.setdefault(kind, []).append(tiles)
        self.tiles = {kind: self._upload(np.concatenate(part)) for kind, part in parts.items()}
        self._addresses: list[int] = []
        self._located = torch.empty(0)

    def run(self, sources: Flats, destinations: Flats) -> None:
        """Queue the copies on the current stream."""
        from triton import language

        from hybrid_engine.transports.tile_kernel import copy_tiles

        ends = ((sources[run.src.buffer], destinations[run.dst.buffer]) for run in self._runs)
        addresses = [flat.data_ptr() for flat in chain(*ends)]
        if addresses != self._addresses:
            for run in self._runs:
                views_of(run, sources, destinations)  # Raises if the memory ends before the run.
            self._located = self._upload(np.array(addresses))
            self._addresses = addresses
        with torch.cuda.device(self._device):
            for (source, target, pack), tiles in self.tiles.items():
                kind = (getattr(language, source), getattr(language, target), pack, _ROWS, _COLUMNS)
                copy_tiles[(len(tiles),)](self._located, tiles, *kind, num_warps=_NUM_WARPS)

    def _upload(self, numbers: np.ndarray) -> torch.Tensor:
        """Queue a copy to the GPU, for which nothing waits."""
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)


def tiled(runs: Sequence[Transfer], sources: Origins, destinations: Origins) -> TiledCopies | None:
    """Return the copies by the kernel; None without a GPU, without Triton, or for another cast."""
    ends = [(sources[run.src.buffer], destinations[run.dst.buffer]) for run in runs]
    devices = {origin.device for origin in chain(*ends)}
    casts = ({source.dtype, target.dtype} for source, target in ends)
    can_cast = all(len(dtypes) == 1 or dtypes <= _TYPES.keys() for dtypes in casts)
    is_on_gpu = [device.type for device in devices] == ["cuda"]
    return TiledCopies(runs, ends) if is_on_gpu and can_cast and find_spec("triton") else None
