"""Safe reading of a checkpoint's `.metadata`: torch's records of what is stored where.

It is unpickled without running code, and validated. torch trusts it: a tensor that lacks a part
would be loaded as the uninitialized memory that was allocated for it. This module checks that the
parts of every tensor cover it exactly once, that every part is stored, and that no two parts
overlap in a file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hybrid_engine.errors import FileError, HybridEngineError, clipped
from hybrid_engine.files.durable import naming
from hybrid_engine.files.reading import read_regular

METADATA = ".metadata"
REMEDY = "Resume from an older checkpoint, or restore the file from a copy"

# bytes; a file of any size could exhaust the host memory
_MAX_NBYTES = 1 << 32
_ALLOWED_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath"},
}
"""Module -> names that `.metadata` may refer to, in addition to dtypes."""

Box = Sequence[tuple[int, int]]
"""(start, end) in elements, for each dim."""


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn any exception that damaged contents cause into a FileError that names `path`.

    torch's readers raise exceptions of any type for these.
    """
    try:
        with naming("reading", path, REMEDY):
            yield
    except HybridEngineError:
        raise
    except Exception as error:
        first_line = str(error).splitlines()[:1]
        reason = clipped(": ".join([type(error).__name__, *first_line]))
        raise FileError(
            f"reading {path}: damaged ({reason}). {REMEDY}", code="damaged-checkpoint"
        ) from error


def read_metadata(directory: Path, nbytes: Mapping[str, int]) -> Metadata:
    """Return the validated metadata of a checkpoint. Raises FileError.

    Args:
        directory: of the checkpoint.
        nbytes: file name -> size in bytes, of the files in `directory`.
    """
    with naming_damage(directory / METADATA):
        contents = read_regular(directory / METADATA, _MAX_NBYTES, follow_links=False)
        metadata = _RestrictedUnpickler(io.BytesIO(contents)).load()
        if type(metadata) is not Metadata:
            raise ValueError(f"it is a {type(metadata).__name__}")
        least_nbytes = _require_complete(metadata)
        _require_stored(metadata, least_nbytes, nbytes)
        return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of `_ALLOWED_NAMES` and dtypes only: pickles may otherwise call any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")
        return super().find_class(module, name)


# The checks below raise ValueError, or whatever a missing attribute raises. Types are compared with
# `is`: the attributes come from a file, and a subclass could behave differently.


def _require_complete(metadata: Metadata) -> dict[MetadataIndex, int]:
    """Check that each entry is complete; return the least number of bytes of each part."""
    least_nbytes: dict[MetadataIndex, int] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if type(key) is str and type(entry) is BytesStorageMetadata:
            least_nbytes[MetadataIndex(key)] = 0
        elif type(key) is str and type(entry) is TensorStorageMetadata:
            _require_covered(key, entry)
            itemsize = entry.properties.dtype.itemsize
            for chunk in entry.chunks:
                index = MetadataIndex(key, chunk.offsets)
                least_nbytes[index] = math.prod(chunk.sizes) * itemsize
        else:
            raise ValueError(f"{key!r} is a {type(entry).__name__}")
    return least_nbytes


def _require_stored(
    metadata: Metadata, least_nbytes: Mapping[MetadataIndex, int], nbytes: Mapping[str, int]
) -> None:
    """Check that each part is stored inside a file, and not in the bytes of another part."""
    stored = metadata.storage_data
    # each part must be stored, and each stored part must belong to an entry
    if stored.keys() != least_nbytes.keys():
        (index, *_) = stored.keys() ^ least_nbytes.keys()
        state = "stored, but not an entry" if index in stored else "not stored"
        raise ValueError(f"{index.fqn} is {state}")
    ranges_of_files: dict[str, list[tuple[int, int]]] = {}
    for index, info in stored.items():
        file = info.relative_path
        if file not in nbytes or type(info.offset) is not int or type(info.length) is not int:
            raise ValueError(f"{index.fqn} is not stored in a file of the checkpoint")
        end = info.offset + info.length
        is_inside = 0 <= info.offset <= end <= nbytes[file]
        if not is_inside or info.length < least_nbytes[index]:
            raise ValueError(f"{index.fqn} does not fit into its range of {file}")
        # saves of this project are not compressed or converted
        if info.transform_descriptors is not None:
            raise ValueError(f"{index.fqn} is stored in another form")
        ranges_of_files.setdefault(file, []).append((info.offset, end))
    for file, ranges in ranges_of_files.items():
        for (_, end), (next_start, _) in pairwise(sorted(ranges)):
            if end > next_start:
                raise ValueError(f"two entries overlap in {file}")


def _require_covered(key: str, entry: TensorStorageMetadata) -> None:
    """Check that each element of the tensor is in exactly one part."""
    if type(entry.size) is not torch.Size or type(entry.properties.dtype) is not torch.dtype:
        raise ValueError(f"{key} has no size or dtype")
    num_dims = len(entry.size)
    boxes = []
    num_elements = 0
    for chunk in entry.chunks:
        shapes = (chunk.offsets, chunk.sizes)
        if any(type(shape) is not torch.Size or len(shape) != num_dims for shape in shapes):
            raise ValueError(f"a part of {key} has other dims")
        box = []
        for start, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True):
            if min(start, length) < 0 or start + length > size:
                raise ValueError(f"a part of {key} is outside of it")
            box.append((start, start + length))
        if math.prod(chunk.sizes):
            boxes.append(box)
            num_elements += math.prod(chunk.sizes)
    # parts inside the tensor that do not overlap and have as many elements cover it
    if num_elements != math.prod(entry.size) or _overlap(boxes):
        raise ValueError(f"the parts of {key} do not cover it exactly once")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return True if any two boxes, none of them empty, have an element in common."""
    if len(boxes) < 2:
        return False
    if not boxes[0]:
        return True  # several parts of a tensor without dims
    # Sweep along the dim with the most different boxes: there each box has the fewest neighbours,
    # and can overlap only with boxes that have not ended where it starts.
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        start, _ = box[dim]
        open_boxes = [other for other in open_boxes if other[dim][1] > start]
        if any(_have_common_element(box, other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _have_common_element(box: Box, other: Box) -> bool:
    return all(
        start < other_end and other_start < end
        for (start, end), (other_start, other_end) in zip(box, other, strict=True)
    )
