"""New sets of safetensors files: planned, brought together by the ranks that write them, and put in place.

    plan_files                  which tensor goes into which file; file i is written by rank i modulo their number
    write_files                 round by round: each rank receives one file's tensors, then writes it
    new_directory, put_in_place the directory is written beside its place and takes it as a whole

So a kill never leaves a mixture of two sets, nor of weights and configuration: the directory is the old one or the new,
or, between two renames, absent, and the old one is `<name>.replaced`.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_engine.backends.huggingface.safetensors_files import StoredTensor, write_file
from hybrid_engine.errors import ConfigError, Violation, first_of
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, write_checksums
from hybrid_engine.files.durable import naming, recover_directory, replace_directory, replaced_by, sync, write_text
from hybrid_engine.files.model_files import COMPANIONS, INDEX, SINGLE, indexed_files
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.transports.copies import strided

_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def plan_files(tensors: Mapping[str, tuple[tuple[int, ...], str]], max_file_nbytes: int) -> dict[str, StoredTensor]:
    """Spread tensors, name -> (shape, dtype), over files of at most `max_file_nbytes` of data (one tensor at least)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        if groups[-1] and filled + nbytes > max_file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return {
        name: StoredTensor(file, *tensors[name]) for file, names in zip(files, groups, strict=True) for name in names
    }


def by_file(stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """File -> its tensors' names; both in order."""
    files: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        files.setdefault(tensor.file, []).append(name)
    return files


def writers(stored: Mapping[str, StoredTensor], num_ranks: int) -> dict[str, int]:
    """Tensor -> the rank that writes it."""
    return {name: index % num_ranks for index, names in enumerate(by_file(stored).values()) for name in names}


def write_files(
    directory: Path,
    stored: Mapping[str, StoredTensor],
    transfers: Sequence[Transfer],
    buffers: Mapping[str, torch.Tensor],
    job: Job,
) -> dict[str, str]:
    """Write the files; return their checksums on all ranks. Collective. Raises FileError.

    Args:
        directory: new, on storage that all ranks share.
        stored: what goes where.
        transfers: this rank's, to and from, in an order that ranks agree on.
        buffers: this rank's weights.
        job: of all ranks.

    Host memory: one file on each rank that writes one.
    """
    checksums: dict[str, str] = {}
    files = by_file(stored)
    moves: dict[str, list[Transfer]] = {name: [] for name in stored}
    for transfer in transfers:
        moves[transfer.dst.buffer.name].append(transfer)
    with ExitStack() as stack:
        group = job.new_group("gloo", stack)
        for start in range(0, len(files), job.world_size):
            held: dict[str, dict[str, torch.Tensor]] = {}
            of_round = list(files.items())[start : start + job.world_size]
            with job.agreement.phase("bringing the weights together", SHORT_PATIENCE), torch.no_grad():
                for writer, (file, names) in enumerate(of_round):
                    for name in names:
                        whole = _moved(stored[name], moves[name], buffers, job.rank, group)
                        if writer == job.rank:
                            held.setdefault(file, {})[name] = whole
            with job.agreement.phase("writing the checkpoint"):
                for file, tensors in held.items():
                    write_file(directory / file, tensors)
                    checksums[file] = checksum_of(directory / file)
    told = job.agreement.gather(checksums, dict[str, str], "writing the checkpoint")
    return {file: crc for each in told for file, crc in each.items()}


def _moved(
    stored: StoredTensor,
    transfers: Sequence[Transfer],
    buffers: Mapping[str, torch.Tensor],
    rank: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Send this rank's boxes of a tensor to the rank that writes it; return it there, and an empty one elsewhere."""
    dtype = getattr(torch, stored.dtype)
    whole = torch.empty(stored.shape if any(one.dst_rank == rank for one in transfers) else 0, dtype=dtype)
    works, arriving, leaving = [], [], []
    for transfer in transfers:
        if transfer.src_rank == rank:
            source = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()
            box = source.to(device="cpu", dtype=dtype)
            if transfer.dst_rank == rank:
                strided(whole.view(-1), transfer.lengths, transfer.dst).copy_(box)
            else:
                leaving.append(_bytes_of(box.contiguous()))
                works.append(dist.isend(leaving[-1], transfer.dst_rank, group=group))
        else:
            arriving.append((transfer, torch.empty(transfer.lengths, dtype=dtype)))
            works.append(dist.irecv(_bytes_of(arriving[-1][1]), transfer.src_rank, group=group))
    for work in filter(None, works):
        work.wait()
    for transfer, box in arriving:
        strided(whole.view(-1), transfer.lengths, transfer.dst).copy_(box)
    return whole


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# -- the directory, on one rank ----------------------------------------------------------------------------------------


def incomplete(directory: Path) -> Path:
    """Return where a new directory is written."""
    return directory.with_name(f"{directory.name}.incomplete")


def require_replaceable(directory: Path) -> None:
    """Raise ConfigError where the directory, or what a killed save left beside it, holds other files than a model's."""
    violations = list(_in_the_way(directory))
    for place in (directory, incomplete(directory), replaced_by(directory)):
        if place.exists() and (names := _foreign_names(place)):
            problem = f"{place} holds files that are not a model's: {first_of(names, 5)}"
            violations.append(Violation("path", problem, "Save to another directory, or move these away"))
    if violations:
        raise ConfigError(violations)


def _in_the_way(directory: Path) -> Iterator[Violation]:
    if Path.cwd().is_relative_to(directory) or directory.is_mount():
        problem = f"{directory} is a mount point, the working directory, or above it: it cannot be replaced"
        yield Violation("path", problem, "Name a directory below it")


def _foreign_names(directory: Path) -> list[str]:
    ours = {INDEX, CHECKSUMS, *(indexed_files(directory) or ())}
    return sorted(
        path.name
        for path in directory.iterdir()
        for name in [path.name.removesuffix(".incomplete")]  # of a write that was killed
        if not path.is_file()
        or not (name in ours or _OUR_FILES.fullmatch(name) or any(fnmatch.fnmatch(name, each) for each in COMPANIONS))
    )


def new_directory(directory: Path) -> Path:
    """Make the directory that will take this one's place; what an earlier save left goes. Raises FileError."""
    new = incomplete(directory)
    with naming("creating", new):
        recover_directory(directory)
        if new.exists():
            shutil.rmtree(new)
        new.mkdir(parents=True)
    return new


def put_in_place(new: Path, directory: Path, stored: Mapping[str, StoredTensor], checksums: Mapping[str, str]) -> None:
    """Complete a new directory, and put it in its place. Raises FileError."""
    if len(checksums) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
            "weight_map": {name: tensor.file for name, tensor in stored.items()},
        }
        write_text(new / INDEX, json.dumps(index, indent=2) + "\n")
    write_checksums(new, checksums)
    with naming("replacing", directory):
        sync(new)
        replace_directory(new, directory)
