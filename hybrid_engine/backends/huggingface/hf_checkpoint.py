"""Training shards from a Hugging Face checkpoint, and a checkpoint from training shards.

A checkpoint is a layout like any other: its tensors are buffers of one more rank, which no process runs. So the planner
says which box of which stored tensor goes where, finds gaps and overlaps, and every rank reads its own boxes. To save,
the tensors are buffers of the ranks that write them; the planner picks which replica sends.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.backends.huggingface import saving
from hybrid_engine.backends.huggingface.unused_tensors import (
    NOT_WEIGHTS,
    compare_repetitions,
    log_unused,
    repetitions,
)
from hybrid_engine.backends.training_side import require_finite_to_save
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    HybridEngineError,
    ParameterMismatchError,
    Violation,
    shortened,
)
from hybrid_engine.files.checksums import CHECKSUMS, read_checksums, require_as_written
from hybrid_engine.files.documents import given_path, read_json
from hybrid_engine.files.durable import naming, write_bytes, write_text
from hybrid_engine.files.model_files import COMPANIONS, CONFIG, DOWNLOAD_AGAIN, INDEX, SINGLE
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import LoadableWeights, TrainingWeights
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.rendezvous import gather_side
from hybrid_engine.transports.copies import strided

logger = logging.getLogger(__name__)

FILE_NBYTES = 5 * 10**9
"""Data per file of a saved checkpoint: the default of transformers."""

_REMEDY = f"Restore it from a copy; if another program wrote it, remove {CHECKSUMS}"
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def load_hf_checkpoint(
    path: str | Path, weights: LoadableWeights, table: ModelTable, job: Job, *, key: str = "path"
) -> None:
    """Fill this rank's training shards from a checkpoint; on all ranks or on none. Collective.

    Args:
        path: directory with safetensors files, one or many with an index, that every rank can read.
        weights: the shards, on the device.
        table: the model's name table.
        job: of all ranks.
        key: what names `path`, for errors.

    Stored values are cast to the shards' dtype. Padding of the vocabulary becomes zero, and LoRA adds nothing.
    Main parameters of an optimizer are not touched: see `ActorHybridWorker.load_hf_checkpoint`.

    What is wrong with the files is found before any rank changes a shard: names, shapes, lengths, and contents where
    there are checksums (`save_hf_checkpoint` writes them). The ranks share that reading, by file.

    Raises:
        ConfigError: for a directory without a usable checkpoint, quantised ones among them.
        FileError: naming the damaged or unreadable file.
        ParameterMismatchError: naming every tensor that is missing, has another shape or is unknown to the table, or
            that should repeat another (a tied head) and differs. Others that are not used are logged.
    """
    with job.agreement.phase("reading the checkpoint's headers"), naming("reading the checkpoint", str(path)):
        directory = given_path(path, key)
        stored = files.stored_tensors(directory, key)
        _require_floats(stored, directory, key)
        own = weights.layout()
        _check_names(stored, table, directory, held=own.tensors)
        known = {name: stored[name] for name in table.shapes if name in stored}
        new = {name: _stand_in(table.shapes[name]) for name in table.may_be_new if name not in stored}
        hosts = [""] * job.world_size + ["files"]  # that the ranks are on several does not matter here
        stored_on = dict.fromkeys(known | new, job.world_size)
        source = Side.split(_layout_of(known | new, stored_on, {}), len(hosts))
        transfers = box_transfers(source, Side.split(own, len(hosts)), hosts, job.rank, table.shapes)
        transfers = [transfer for transfer in transfers if transfer.tensor not in new]
    job.agreement.rounds("verifying the checkpoint", _verify(directory, _share_of_files(stored, job)))
    compared = compare_repetitions(directory, stored, table, job.rank, job.world_size)
    job.agreement.rounds("comparing repeated tensors", compared)
    if job.rank == 0:
        log_unused(directory, stored, table)
    with ExitStack() as stack:
        with job.agreement.phase("preparing the weights"):
            weights.prepare()
            buffers = weights.buffers()
            names = sorted({known[transfer.tensor].file for transfer in transfers})
            reader = stack.enter_context(files.SliceReader(directory, names))
        nbytes = sum(_stored_nbytes(transfer, known) for transfer in transfers)
        advance = stack.enter_context(_progress(f"reading {directory}", nbytes, is_shown=job.rank == 0))
        with torch.no_grad():
            steps = _read(transfers, buffers, known, reader, advance)
            job.agreement.rounds("reading the checkpoint", steps)
        with job.agreement.phase("zeroing what no weight covers"), torch.no_grad():
            weights.zero_padding()
            weights.zero_adapters()
    if new and job.rank == 0:
        logger.warning("%s has no %s: new in this model, to be trained", directory, ", ".join(sorted(new)))


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
        stored = saving.plan_files(_tensors_to_store(source.layout, table, stored_dtype), file_nbytes)
        written = _layout_of(stored, saving.writers(stored, job.world_size), table.copies)
        destination = Side.split(written, job.world_size)
        transfers = box_transfers(source, destination, [""] * job.world_size, job.rank)
        buffers = weights.buffers()
        if check_nan:
            require_finite_to_save(lambda: _as_stored(transfers, buffers, stored, job.rank))
    new = saving.incomplete(directory)
    is_ours = False
    try:
        with job.agreement.phase("creating the checkpoint's directory"), naming("creating", directory):
            if job.rank == 0:
                saving.require_replaceable(directory)
                _require_same_model(directory, table)
                is_ours = True
                saving.new_directory(directory)
        checksums = saving.write_files(new, stored, transfers, buffers, job)
        with job.agreement.phase("publishing the checkpoint"):
            if job.rank == 0:
                _copy_companions(directory if model_dir is None else Path(model_dir), new, _usual_dtype(stored))
                saving.put_in_place(new, directory, stored, checksums)
    except BaseException as error:
        if is_ours and new.exists():
            try:
                shutil.rmtree(new)
            except OSError as failure:
                error.add_note(f"{new} could not be removed: {failure}")
        raise


def _require_same_model(directory: Path, table: ModelTable) -> None:
    """Raise ConfigError unless the weights in the directory, which will be replaced, are of the same model."""
    if not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return
    try:
        _check_names(files.stored_tensors(directory), table, directory)
    except HybridEngineError as error:
        reason = error.findings[0] if isinstance(error, ParameterMismatchError) else error
        problem = f"{directory} holds other weights than this model's ({reason})"
        raise ConfigError([Violation("path", problem, "Name another directory, or remove its weights")]) from error


def _share_of_files(stored: Mapping[str, files.StoredTensor], job: Job) -> list[str]:
    """The files that this rank reads as a whole; every file has one such rank."""
    return sorted({tensor.file for tensor in stored.values()})[job.rank :: job.world_size]


def _require_floats(stored: Mapping[str, files.StoredTensor], directory: Path, key: str) -> None:
    """Raise ConfigError for quantised weights, which mean nothing without their scales."""
    weights = {name: tensor.dtype for name, tensor in stored.items() if not name.endswith(NOT_WEIGHTS)}
    if strange := {name: dtype for name, dtype in weights.items() if dtype not in _FLOATS}:
        name, dtype = next(iter(strange.items()))
        problem = f"{directory} has quantised weights: {len(strange)} tensors, e.g. {name} in {dtype}"
        raise ConfigError([Violation(key, problem, f"Name a checkpoint in one of {', '.join(_FLOATS)}")])


def _float_name(dtype: object) -> str | None:
    """The name of a dtype that weights can be stored in. Raises ArgumentError for anything else."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name is None or (isinstance(name, str) and name in _FLOATS):
        return name
    remedy = f"Use one of {', '.join(_FLOATS)}, as a name or torch's, or leave it out for the weights' own"
    raise ArgumentError([Violation("dtype", f"weights cannot be stored as {shortened(dtype)}", remedy)])


def _check_names(
    stored: Mapping[str, files.StoredTensor], table: ModelTable, directory: Path, held: Container[str] = ()
) -> None:
    """Raise ParameterMismatchError unless these are the table's tensors; only who holds one that vLLM does not read,
    of a layer for multi-token prediction, needs it."""
    needed = [name for name in table.shapes if (table.is_served(name) or name in held) and name not in table.may_be_new]
    findings = [f"{name}: missing in the checkpoint" for name in needed if name not in stored]
    findings += [
        f"{name}: shape {stored[name].shape} in the checkpoint, expected {shape}"
        for name, shape in table.shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    known = {*table.shapes, *repetitions(table), *table.left_out}
    for name in stored:
        if name not in known and not name.endswith(NOT_WEIGHTS):
            findings.append(f"{name}: in the checkpoint, but unknown to the model's name table")
    if findings:
        raise ParameterMismatchError([*_other_architecture(directory, table), *findings], str(directory))


def _other_architecture(directory: Path, table: ModelTable) -> Iterator[str]:
    """What explains a checkpoint's other tensors, where its configuration can be read."""
    try:
        names = read_json(directory / CONFIG, "path", DOWNLOAD_AGAIN).get("architectures")
    except ConfigError:
        return
    if isinstance(names, list) and names and table.architecture not in names:
        yield f"{CONFIG} there is of {', '.join(map(str, names[:3]))}, this model is {table.architecture}"


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


def _layout_of(stored: Mapping[str, files.StoredTensor], ranks: Mapping[str, int], copies: Mapping[str, str]) -> Layout:
    """Stored tensors as the layout of the `ranks` that hold them: each is a buffer; a copy holds another's region."""
    buffers, shards = {}, []
    for name, tensor in stored.items():
        buffer = BufferId(ranks[name], name)
        buffers[buffer] = Buffer(math.prod(tensor.shape), tensor.dtype, group=copies.get(name, name))
        region = Region(copies.get(name, name), (0,) * len(tensor.shape), tensor.shape)
        shards.append(Shard(region, Place(buffer, 0, contiguous_strides(tensor.shape))))
    shapes = {name: tensor.shape for name, tensor in stored.items() if name not in copies}
    return Layout(shapes, buffers, tuple(shards))


def _verify(directory: Path, names: Sequence[str]) -> Iterator[None]:
    """File by file, where there are checksums."""
    checksums = read_checksums(directory, _REMEDY) if (directory / CHECKSUMS).is_file() else {}
    for name in names:
        if name in checksums:
            require_as_written((directory / name).resolve(), checksums[name], _REMEDY)
        yield


@contextmanager
def _progress(what: str, nbytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show on stderr, where it is a terminal, how many of `nbytes` are read; elsewhere the log has a line.

    Yields what is called with the bytes that were read since the last call.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    is_terminal = sys.stderr.isatty()
    if is_shown and not is_terminal:
        logger.info("%s: %.1f GB on this rank", what, nbytes / 1e9)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    is_disabled = not (is_shown and is_terminal)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_disabled) as shown:
        yield partial(shown.advance, shown.add_task(what, total=nbytes))


def _stored_nbytes(transfer: Transfer, stored: Mapping[str, files.StoredTensor]) -> int:
    return math.prod(transfer.lengths) * DTYPE_NBYTES[stored[transfer.tensor].dtype]


def _read(
    transfers: list[Transfer],
    buffers: Mapping[str, torch.Tensor],
    stored: Mapping[str, files.StoredTensor],
    reader: files.SliceReader,
    advance: Callable[[int], None],
) -> Iterator[None]:
    """Box by box."""
    for transfer in transfers:
        tensor = stored[transfer.tensor]
        # stored tensors are contiguous, so the first element's position says where in the tensor the box begins
        offsets = tuple(int(index) for index in np.unravel_index(transfer.src.offset, tensor.shape))
        box = reader.read(transfer.tensor, tensor, offsets, transfer.lengths)
        strided(buffers[transfer.dst.buffer.name], transfer.lengths, transfer.dst).copy_(box)
        advance(_stored_nbytes(transfer, stored))
        yield


def _as_stored(
    transfers: Sequence[Transfer],
    buffers: Mapping[str, torch.Tensor],
    stored: Mapping[str, files.StoredTensor],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each box that this rank gives as it will be stored, with its name for messages."""
    for transfer in transfers:
        if transfer.src_rank == rank:
            dtype = stored[transfer.dst.buffer.name].dtype
            box = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()
            yield f"{transfer.tensor} as {dtype} on rank {rank}", box.to(getattr(torch, dtype))


def _stand_in(shape: tuple[int, ...]) -> files.StoredTensor:
    """What is planned with in place of a tensor that a checkpoint need not have, and not read."""
    return files.StoredTensor("", shape, "float32")


def _usual_dtype(stored: Mapping[str, files.StoredTensor]) -> str:
    """The dtype of most tensors."""
    return Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]


def _copy_companions(model_dir: Path, new: Path, dtype: str) -> None:
    """Copy configuration and tokenizer; the configuration with `dtype` and without quantisation."""
    for path in (path for pattern in COMPANIONS for path in model_dir.glob(pattern)):
        if path.name != CONFIG:
            with naming("copying", path):
                write_bytes(new / path.name, path.read_bytes())
    path = model_dir / CONFIG
    if path.is_file():
        with naming("reading", path, DOWNLOAD_AGAIN):
            config = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"a {type(config).__name__}, not a mapping")
        config.pop("quantization_config", None)
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        write_text(new / CONFIG, json.dumps(config, indent=2) + "\n")
