"""Runs: equal boxes at equal distances, copied by views of torch or, on a GPU, by tiles.

    transfers --> runs: transfers with one dim more, which may descend in the source
    a run     --> a view on either side, cut into its boxes if the source descends
    runs      --> tiles: a table of numbers on the GPU, made once; a kernel copies one per program
    addresses --> a table, made again if one has changed

Runs pay off for experts: Megatron's buffers hold the last expert first, vLLM's the first.

The kernel has one launch for all tiles that permit 16 bytes at a time, and one for those that do
not: for each size of elements, and for each pair of dtypes that is cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from hybrid_engine.planning.coalescing import flattened, join, regular_runs
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
_HAS_TRITON = find_spec("triton") is not None


class Origin(NamedTuple):
    """Position of a flat buffer: `offset` elements from the start of the storage of this number.

    `shift`: elements of its address beyond a multiple of 16 bytes.
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
        shift = address % _WIDE_NBYTES // itemsize
        origins[buffer] = Origin(number, offset, flat.dtype, shift, flat.device)
    return origins


def runs_of(transfers: Iterable[Transfer], origins: Origins) -> Iterator[Transfer]:
    """Combine transfers into runs.

    Args:
        transfers: the transfers.
        origins: origins of the buffers that they read.
    """
    alike: dict[object, list[tuple[int, Transfer]]] = {}
    for transfer in transfers:
        src = transfer.src
        dst = transfer.dst
        origin = origins[src.buffer]
        # Buffers of one storage can share a view, so the source buffer is not part of the key.
        key = (
            origin.storage,
            origin.dtype,
            dst.buffer,
            transfer.lengths,
            src.strides,
            dst.strides,
        )
        alike.setdefault(key, []).append((origin.offset + src.offset, transfer))
    for group in alike.values():
        # Runs ascend in the destination.
        group.sort(key=lambda placed: placed[1].dst.offset)
        offsets = [(offset, transfer.dst.offset) for offset, transfer in group]
        for run, distances in regular_runs(offsets, backwards=True):
            boxes = [transfer for _, transfer in group[run.start : run.stop]]
            yield flattened(join(boxes, *distances))


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """Return the box of `lengths` at `place` of a flat buffer as a view, in elements."""
    return flat.as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


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
    lowest = Place(
        run.src.buffer, run.src.offset + first * (run.lengths[0] - 1), (-first, *strides)
    )
    return into.unbind(), strided(source, run.lengths, lowest).unbind()[::-1]


def can_tile(source: Origin, target: Origin) -> bool:
    """Return whether the kernel copies between two buffers: on one GPU, with a cast it knows."""
    is_known = source.dtype == target.dtype or {source.dtype, target.dtype} <= _TYPES.keys()
    is_on_gpu = source.device == target.device and target.device.type == "cuda"
    return is_known and is_on_gpu and _HAS_TRITON


def tiles_of(
    run: Transfer, source: Origin, target: Origin
) -> tuple[tuple[str, str, int], np.ndarray]:
    """Cut a run into tiles.

    Returns the types of the elements, the elements of a unit, and int64 [tiles, 6]: offset in the
    source and in the destination, rows, length of a row, distance of rows in the source and in the
    destination. All but the number of rows are in units.
    """
    dtypes = (source.dtype, target.dtype)
    types = (_TYPES.get(dtype, f"int{8 * dtype.itemsize}") for dtype in dtypes)
    dims = [(1, 0, 0), *zip(run.lengths, run.src.strides, run.dst.strides, strict=True)]
    width = dims.pop()[0] if dims[-1][1:] == (1, 1) else 1
    numbers = np.array(
        [(width, source.shift, target.shift), (1, run.src.offset, run.dst.offset), *dims]
    )
    pack = _WIDE_NBYTES // max(dtype.itemsize for dtype in dtypes)
    if (numbers[:, 1:] % pack).any() or width % pack:
        pack = 1
    # A tile has rows of `columns` units, and as many rows as fit along the longest dim.
    units = width // pack
    columns = min(units & -units, _COLUMNS)
    (_, *offset), *outer = numbers[1:] // (1, pack, pack)
    steps = np.array([*outer, (units // columns, columns, columns)])
    longest = steps[:, 0].argmax()
    height, *distances = steps[longest]
    steps[longest] = (-(-height // _ROWS), *np.multiply(distances, _ROWS))
    index = np.indices(steps[:, 0]).reshape(len(steps), -1).T
    offsets = offset + index @ steps[:, 1:]
    rows = np.minimum(height - _ROWS * index[:, longest], _ROWS)
    rest = np.broadcast_to((columns, *distances), (len(index), 3))
    # Bytes of any dtype are moved alike.
    is_alike = pack > 1 and source.dtype == target.dtype
    kind = ("int64", "int64", 2) if is_alike else (*types, pack)
    return kind, np.column_stack((offsets, rows, rest))


class TiledCopies:
    """Copies of runs within a GPU. Only numbers are kept.

    Attributes:
        tiles: by class (see `tiles_of`), int64 [tiles, 7]: the tile, and the number of its run.
    """

    def __init__(self, runs: Sequence[Transfer], sources: Origins, destinations: Origins) -> None:
        """Make the tables, which take about 0.1 % of the copied bytes."""
        self._runs = runs
        self._device = destinations[runs[0].dst.buffer].device
        parts: dict[tuple[str, str, int], list[np.ndarray]] = {}
        for number, run in enumerate(runs):
            kind, tiles = tiles_of(run, sources[run.src.buffer], destinations[run.dst.buffer])
            parts.setdefault(kind, []).append(np.insert(tiles, 6, number, axis=1))
        self.tiles = {
            kind: torch.from_numpy(np.concatenate(tiles)).to(self._device)
            for kind, tiles in parts.items()
        }
        self._addresses: list[int] = []
        self._located = torch.empty(0)

    def run(self, sources: Flats, destinations: Flats) -> None:
        """Queue the copies on the current stream."""
        from hybrid_engine.transports.tile_kernel import copy_tiles, tl

        addresses = [
            flat.data_ptr()
            for run in self._runs
            for flat in (sources[run.src.buffer], destinations[run.dst.buffer])
        ]
        if addresses != self._addresses:
            for run in self._runs:
                views_of(run, sources, destinations)  # Raises if the memory ends before the run.
            on_host = torch.tensor(addresses).pin_memory()
            self._located = on_host.to(self._device, non_blocking=True)
            self._addresses = addresses
        with torch.cuda.device(self._device):
            for (source, target, pack), tiles in self.tiles.items():
                kind = (getattr(tl, source), getattr(tl, target), pack, _ROWS, _COLUMNS)
                copy_tiles[(len(tiles),)](self._located, tiles, *kind, num_warps=_NUM_WARPS)
