"""A Hugging Face checkpoint from training shards: planned, brought together by the ranks that write it, put in place.

    plan_files                  which tensor goes into which file; file i is written by rank i modulo their number
    write_files                 round by round: each rank receives one file's tensors, then writes it
    new_directory, put_in_place the directory is written beside its place and takes it as a whole

The tensors of the files are buffers of the ranks that write them; the planner picks which replica sends. A kill never
leaves a mixture of two sets, nor of weights and configuration: the directory is the old one or the new, or, between two
renames, absent, and the old one is `<name>.replaced`.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hybrid_engine.backends.huggingface.loading import FLOATS, check_names, layout_of
from hybrid_engine.backends.huggingface.safetensors_files import StoredTensor, stored_tensors, write_file
from hybrid_engine.backends.training_side import require_finite_to_save
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    HybridEngineError,
    ParameterMismatchError,
    Violation,
    first_of,
    shortened,
)
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, write_checksums
from hybrid_engine.files.documents import MOST_BYTES, MOST_JSON_BYTES, given_path
from hybrid_engine.files.durable import (
    naming,
    recover_directory,
    replace_directory,
    replaced_by,
    sync,
    write_bytes,
    write_text,
)
from hybrid_engine.files.model_files import COMPANIONS, CONFIG, DOWNLOAD_AGAIN, INDEX, SINGLE, files_like, indexed_files
from hybrid_engine.files.reading import read_regular
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Layout
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.rendezvous import gather_side
from hybrid_engine.transports.copies import strided

FILE_NBYTES = 5 * 10**9
"""Data per file of a saved checkpoint: the default of transformers."""

_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_hf_checkpoint(
    path: str | Path,
    weights: TrainingWeights,
    table: ModelTable,
    job: Job,
    model_dir: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    file_nbytes: int = FILE_NBYTES,
    *,
    check_nan: bool = True,
) -> None:
    """Write the training shards as a checkpoint that transformers and vLLM load. Collective.

    Args:
        path: directory on storage that all ranks share; created if missing.
        weights: the shards, on the device.
        table: the model's name table.
        job: of all ranks.
        model_dir: configuration and tokenizer are copied from here.
        dtype: of the stored weights, e.g. "bfloat16" or torch.bfloat16; default: that of the shards.
        file_nbytes: most bytes of data in one file.
        check_nan: refuse, before anything is written, what would be stored as NaN or infinity.

    The directory is replaced as a whole: a kill at any moment leaves the old one or the new one, see saving.py.

    Raises:
        ConfigError: before anything is written, for another dtype, and if the directory holds weights of another model
            or files that are not a model's.
        FileError: naming the file; the old directory stays.
        WeightError: naming the tensors that are not finite, or not in `dtype`.
    """
    with job.agreement.phase("preparing the weights"), naming("looking into", str(path)):
        directory = given_path(path, "path").resolve()
        stored_dtype = _float_name(dtype)
        weights.prepare()
    source = gather_side(job, weights)
    with job.agreement.phase("planning the checkpoint"):
        stored = plan_files(_tensors_to_store(source.layout, table, stored_dtype), file_nbytes)
        written = layout_of(stored, writers(stored, job.world_size), table.copies)
        destination = Side.split(written, job.world_size)
        transfers = box_transfers(source, destination, [""] * job.world_size, job.rank)
        buffers = weights.buffers()
        if check_nan:
            require_finite_to_save(lambda: _as_stored(transfers, buffers, stored, job.rank))
    new = incomplete(directory)
    is_ours = False
    try:
        with job.agreement.phase("creating the checkpoint's directory"), naming("creating", directory):
            if job.rank == 0:
                require_target(directory, table)
                is_ours = True
                new_directory(directory)
        checksums = write_files(new, stored, transfers, buffers, job)
        with job.agreement.phase("publishing the checkpoint"):
            if job.rank == 0:
                ((usual_dtype, _),) = Counter(tensor.dtype for tensor in stored.values()).most_common(1)
                _copy_companions(directory if model_dir is None else Path(model_dir), new, usual_dtype)
                put_in_place(new, directory, stored, checksums)
    except BaseException as error:
        if is_ours and new.exists():
            try:
                shutil.rmtree(new)
            except OSError as failure:
                error.add_note(f"{new} could not be removed: {failure}")
        raise


def require_target(path: str | Path, table: ModelTable) -> None:
    """Raise what `save_hf_checkpoint` would raise about its directory, as it is now. By one rank.

    Raises ConfigError and FileError.
    """
    directory = given_path(path, "path").resolve()
    with naming("looking into", directory):
        require_replaceable(directory)
        _require_same_model(directory, table)


def _require_same_model(directory: Path, table: ModelTable) -> None:
    """Raise ConfigError unless the weights in the directory, which will be replaced, are of the same model."""
    if not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return
    try:
        check_names(stored_tensors(directory), table, directory)
    except HybridEngineError as error:
        reason = error.findings[0] if isinstance(error, ParameterMismatchError) else error
        problem = f"{directory} holds other weights than this model's ({reason})"
        raise ConfigError([Violation("path", problem, "Name another directory, or remove its weights")]) from error


def _float_name(dtype: object) -> str | None:
    """The name of a dtype that weights can be stored in. Raises ArgumentError for anything else."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name is None or (isinstance(name, str) and name in FLOATS):
        return name
    remedy = f"Use one of {', '.join(FLOATS)}, as a name or torch's, or leave it out for the weights' own"
    raise ArgumentError([Violation("dtype", f"weights cannot be stored as {shortened(dtype)}", remedy)])


def _tensors_to_store(source: Layout, table: ModelTable, dtype: str | None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) in the checkpoint's order, copies last.

    transformers' models have no layers for multi-token prediction, which vLLM does not read either: they are left out.
    """
    held_in = {shard.region.tensor: source.buffers[shard.place.buffer].dtype for shard in source.shards}
    if missing := [name for name in table.shapes if name not in held_in and table.is_served(name)]:
        raise ParameterMismatchError([f"{name}: no training rank holds it" for name in missing])
    held = {name: shape for name, shape in table.shapes.items() if name in held_in}
    stored = {name: (shape, table.dtypes.get(name) or dtype or held_in[name]) for name, shape in held.items()}
    return stored | {copy: stored[name] for copy, name in table.copies.items() if held_in.keys() >= table.shapes.keys()}


def _as_stored(
    transfers: Sequence[Transfer],
    buffers: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each box that this rank gives as it will be stored, with its name for messages."""
    for transfer in transfers:
        if transfer.src_rank == rank:
            dtype = stored[transfer.dst.buffer.name].dtype
            box = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()
            yield f"{transfer.tensor} as {dtype} on rank {rank}", box.to(getattr(torch, dtype))


def _copy_companions(model_dir: Path, new: Path, dtype: str) -> None:
    """Copy configuration and tokenizer; the configuration with `dtype` and without quantisation."""
    for path in files_like(model_dir, COMPANIONS):
        if path.name != CONFIG:
            with naming("copying", path, DOWNLOAD_AGAIN):
                write_bytes(new / path.name, read_regular(path, MOST_BYTES))
    path = model_dir / CONFIG
    if path.is_file():
        with naming("reading", path, DOWNLOAD_AGAIN):
            config = json.loads(read_regular(path, MOST_JSON_BYTES))
            if not isinstance(config, dict):
                raise ValueError(f"a {type(config).__name__}, not a mapping")
        config.pop("quantization_config", None)
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        write_text(new / CONFIG, json.dumps(config, indent=2) + "\n")


# -- files -----------------------------------------------------------------------------------------------------------


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

    `transfers`: to and from this rank, in an order that ranks agree on. Host memory: one file on each rank that writes
    one.
    """
    checksums: dict[str, str] = {}
    files = by_file(stored)
    moves: dict[str, list[Transfer]] = {name: [] for name in stored}
    for transfer in transfers:
        moves[transfer.dst.buffer.name].append(transfer)
    with ExitStack() as stack:
        parts = job.parts_that_meet(rank for transfer in transfers for rank in (transfer.src_rank, transfer.dst_rank))
        group = None if parts is None else job.new_group(stack, parts)
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
    group: RankGroup | None,
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
                assert group is not None, "it meets somebody"
                leaving.append(_bytes_of(box.contiguous()))
                works.append(group.begin_send(leaving[-1], transfer.dst_rank))
        else:
            assert group is not None, "it meets somebody"
            arriving.append((transfer, torch.empty(transfer.lengths, dtype=dtype)))
            works.append(group.begin_receive(_bytes_of(arriving[-1][1]), transfer.src_rank))
    for work in works:
        work.wait()
    for transfer, box in arriving:
        strided(whole.view(-1), transfer.lengths, transfer.dst).copy_(box)
    return whole


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# -- the directory, on one rank ----------------------------------------------------------------------------------------


def incomplete(directory: Path) -> Path:
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
