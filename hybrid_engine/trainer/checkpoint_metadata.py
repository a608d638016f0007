"""`.metadata` of a checkpoint, torch's records of what is stored where: unpickled without code, and proven to be whole.

torch trusts it: an entry that lacks a part would be loaded as the uninitialised memory that was to receive it. Here
every tensor is made of its parts exactly once, every part is stored, and no two are stored in the same place.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hybrid_engine.errors import FileError, HybridEngineError, clipped
from hybrid_engine.files.durable import naming
from hybrid_engine.files.reading import read_regular

METADATA = ".metadata"
REMEDY = "Resume from an older checkpoint, or restore the file from a copy"

_MOST_NBYTES = 1 << 32
_RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"Path", "PosixPath"},
}
"""What `.metadata` consists of, beside dtypes."""


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn whatever damaged contents make readers raise into a FileError: torch's raise any kind of exception."""
    try:
        with naming("reading", path, REMEDY):
            yield
    except HybridEngineError:
        raise
    except Exception as error:
        reason = clipped(": ".join([type(error).__name__, *str(error).splitlines()[:1]]))
        raise FileError(f"reading {path}: damaged ({reason}). {REMEDY}") from error


def read_metadata(directory: Path, nbytes: Mapping[str, int]) -> Metadata:
    """Return the metadata of a checkpoint. Raises FileError.

    Args:
        directory: of the checkpoint.
        nbytes: of the files there, by name.
    """
    with naming_damage(directory / METADATA):
        contents = read_regular(directory / METADATA, _MOST_NBYTES, follow_links=False)
        metadata = _Unpickler(io.BytesIO(contents)).load()
        if type(metadata) is not Metadata:
            raise ValueError(f"it is a {type(metadata).__name__}")
        _require_whole(metadata, nbytes)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")
        return super().find_class(module, name)


def _require_whole(metadata: Metadata, nbytes: Mapping[str, int]) -> None:
    """Raise ValueError, or what a missing attribute raises, unless each entry is stored, whole and once."""
    least_nbytes: dict[MetadataIndex, int] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if type(key) is str and type(entry) is BytesStorageMetadata:
            least_nbytes[MetadataIndex(key)] = 0
        elif type(key) is str and type(entry) is TensorStorageMetadata:
            _require_covered(key, entry)
            itemsize = entry.properties.dtype.itemsize
            for chunk in entry.chunks:
                least_nbytes[MetadataIndex(key, chunk.offsets)] = math.prod(chunk.sizes) * itemsize
        else:
            raise ValueError(f"{key!r} is a {type(entry).__name__}")
    stored = metadata.storage_data
    if stored.keys() != least_nbytes.keys():
        (index, *_) = stored.keys() ^ least_nbytes.keys()
        raise ValueError(f"{index.fqn} is {'stored, but not an entry' if index in stored else 'not stored'}")
    places: dict[str, list[tuple[int, int]]] = {}
    for index, info in stored.items():
        numbers = (info.offset, info.length)
        if info.relative_path not in nbytes or {type(number) for number in numbers} != {int}:
            raise ValueError(f"{index.fqn} is not stored in a file of the checkpoint")
        end = info.offset + info.length
        if not 0 <= info.offset <= end <= nbytes[info.relative_path] or info.length < least_nbytes[index]:
            raise ValueError(f"{index.fqn} does not fit into its place in {info.relative_path}")
        if info.transform_descriptors is not None:
            raise ValueError(f"{index.fqn} is stored in another form")
        places.setdefault(info.relative_path, []).append((info.offset, end))
    for file, ranges in places.items():
        if any(end > start for (_, end), (start, _) in pairwise(sorted(ranges))):
            raise ValueError(f"two entries are stored in the same place of {file}")


def _require_covered(key: str, entry: TensorStorageMetadata) -> None:
    """Raise ValueError unless each element of the tensor is in exactly one of its parts."""
    if type(entry.size) is not torch.Size or type(entry.properties.dtype) is not torch.dtype:
        raise ValueError(f"{key} has no size or dtype")
    for chunk in entry.chunks:
        shapes = (chunk.offsets, chunk.sizes)
        if {type(shape) for shape in shapes} != {torch.Size} or {len(shape) for shape in shapes} != {len(entry.size)}:
            raise ValueError(f"a part of {key} has other dims")
        bounds = zip(*shapes, entry.size, strict=True)
        if any(min(offset, length) < 0 or offset + length > size for offset, length, size in bounds):
            raise ValueError(f"a part of {key} is outside of it")
    parts = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in parts) != math.prod(entry.size) or _overlap(parts):
        raise ValueError(f"the parts of {key} do not make the whole of it once")


def _overlap(parts: Iterable[ChunkStorageMetadata]) -> bool:
    """Return whether any two parts, none of them empty, have an element in common."""
    boxes = [[(start, start + length) for start, length in zip(one.offsets, one.sizes, strict=True)] for one in parts]
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    # along the dim that is cut into most pieces, a part can overlap only with those that have not ended
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim] for box in boxes}))
    open_boxes: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        open_boxes = [other for other in open_boxes if other[dim][1] > box[dim][0]]
        if any(_have_common_element(box, other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _have_common_element(box: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    return all(start < end and begin < stop for (start, stop), (begin, end) in zip(box, other, strict=True))
