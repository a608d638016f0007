"""Training shards from a Hugging Face checkpoint, and a checkpoint from training shards.

A checkpoint is a layout like any other: its tensors are buffers of one more rank, which no process runs. So the planner
says which box of which stored tensor goes where, finds gaps and overlaps, and picks which replica writes. Every rank
reads or writes its own boxes and nothing else; nothing is gathered.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from hybrid_engine.backends.flat_buffers import require_finite_to_save
from hybrid_engine.backends.huggingface import publishing
from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.backends.huggingface.progress import Advance, progress
from hybrid_engine.backends.huggingface.unused_tensors import (
    NOT_WEIGHTS,
    compare_repetitions,
    log_unused,
    repetitions,
)
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    HybridEngineError,
    ParameterMismatchError,
    Violation,
    shortened,
)
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
from hybrid_engine.transports.copies import strided

logger = logging.getLogger(__name__)

FILE_NBYTES = 5 * 10**9
"""Data per file of a saved checkpoint: the default of transformers."""

_Box = tuple[Transfer, files.StoredTensor, torch.Tensor]

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

    What is wrong with the files is found before any rank changes a shard: names, shapes, lengths, and contents where a
    file carries a checksum (those of `save_hf_checkpoint` do). The ranks share that reading, by file.

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
        source = _layout_of(known | new, job.world_size, {})
        transfers = box_transfers(source, own, _hosts(job), job.rank, table.shapes)
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
        shown = progress(f"reading {directory}", nbytes, is_shown=job.rank == 0)
        with shown as advance, torch.no_grad():
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

    An older set of weights of the same model is replaced: a kill at any moment leaves the old set or the new one, see
    publishing.py. Only files that its index names are removed, and model.safetensors. Configuration and tokenizer are
    replaced just before the weights: a failure in between leaves the new ones beside the old weights.

    Raises:
        ConfigError: if the directory holds weights of another model; these stay. For another dtype, before anything.
        FileError: naming the file; on a full disk before anything is written.
        WeightError: naming the tensors that are not finite, or not in `dtype`.
    """
    with job.agreement.phase("preparing the weights"):
        directory = given_path(path, "path")
        stored_dtype = _float_name(dtype)
        weights.prepare()
        own = weights.layout()
    layouts = job.agreement.gather(own, "save_hf_checkpoint")
    with job.agreement.phase("planning the checkpoint"):
        source = Layout.merge(layouts)
        stored = publishing.plan_files(_tensors_to_store(source, table, stored_dtype), file_nbytes)
        destination = _layout_of(stored, job.world_size, table.copies)
        transfers = box_transfers(source, destination, _hosts(job), job.rank)
        if check_nan:
            require_finite_to_save(lambda: _as_stored(_boxes(transfers, weights.buffers(), stored), job.rank))
    publication = publishing.Publication(directory, stored)
    try:
        with job.agreement.phase("creating the checkpoint's files"):
            if job.rank == 0:
                publication.abandon()  # what is left of an earlier save that was killed
                older = older_weights(directory, table)
                publication.begin()
        with job.agreement.phase("writing the checkpoint"), torch.no_grad():
            _write(_boxes(transfers, weights.buffers(), stored), directory)
        with job.agreement.phase("sealing the checkpoint"):
            for file in _share_of_files(stored, job):
                publishing.seal(directory / (file + publishing.SUFFIX))
        with job.agreement.phase("publishing the checkpoint"):
            if job.rank == 0:
                publish(publication, directory, model_dir, stored, older)
    except BaseException as error:
        if job.rank == 0:
            _abandon(publication, error)
        raise


def older_weights(directory: Path, table: ModelTable) -> dict[str, files.StoredTensor]:
    """The weights in the directory, which will be replaced. Raises ConfigError unless they are of the same model."""
    if not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return {}
    place = directory
    try:
        older = files.stored_tensors(directory)
        _check_names(older, table, directory)
        place = directory / SINGLE  # transformers prefers it to the index, so it would hide the new weights
        if place.is_file() and SINGLE not in {tensor.file for tensor in older.values()}:
            _check_names(files.stored_in(place), table, directory)
    except HybridEngineError as error:
        reason = error.findings[0] if isinstance(error, ParameterMismatchError) else error
        problem = f"{place} holds other weights than this model's ({reason})"
        remedy = "Name another directory, or remove its weights and their index"
        raise ConfigError([Violation("path", problem, remedy)]) from error
    return older


def publish(
    publication: publishing.Publication,
    directory: Path,
    model_dir: str | Path | None,
    stored: Mapping[str, files.StoredTensor],
    older: Mapping[str, files.StoredTensor],
) -> None:
    """Replace weights, configuration and tokenizer.

    The configuration is written twice: until the new weights are in place, its dtype is one that rounds neither set.
    """
    dtype = _usual_dtype(stored)
    if older:
        wider = torch.promote_types(getattr(torch, dtype), getattr(torch, _usual_dtype(older)))
        dtype = str(wider).removeprefix("torch.")
    _copy_companions(model_dir, directory, dtype)
    publication.publish()
    if older:
        _write_config(directory, directory, _usual_dtype(stored))


def _abandon(publication: publishing.Publication, error: BaseException) -> None:
    """Clean up after `error`, to which a failure to do so is added as a note."""
    try:
        publication.abandon()
    except HybridEngineError as failure:
        error.add_note(f"The files of this save could not be removed: {failure}")


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


def _layout_of(stored: Mapping[str, files.StoredTensor], rank: int, copies: Mapping[str, str]) -> Layout:
    """The files as the layout of one more rank: every stored tensor is a buffer; a copy holds another's region."""
    buffers, shards = {}, []
    for name, tensor in stored.items():
        buffer = BufferId(rank, name)
        buffers[buffer] = Buffer(math.prod(tensor.shape), tensor.dtype, group=copies.get(name, name))
        region = Region(copies.get(name, name), (0,) * len(tensor.shape), tensor.shape)
        shards.append(Shard(region, Place(buffer, 0, contiguous_strides(tensor.shape))))
    shapes = {name: tensor.shape for name, tensor in stored.items() if name not in copies}
    return Layout(shapes, buffers, tuple(shards))


def _verify(directory: Path, names: Sequence[str]) -> Iterator[None]:
    """File by file."""
    for name in names:
        if not files.verify_checksum(directory / name):
            logger.info("%s has no checksum: its contents are not verified", directory / name)
        yield


def _stored_nbytes(transfer: Transfer, stored: Mapping[str, files.StoredTensor]) -> int:
    return math.prod(transfer.lengths) * DTYPE_NBYTES[stored[transfer.tensor].dtype]


def _read(
    transfers: list[Transfer],
    buffers: Mapping[str, torch.Tensor],
    stored: Mapping[str, files.StoredTensor],
    reader: files.SliceReader,
    advance: Advance,
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


def _boxes(
    transfers: Sequence[Transfer], buffers: Mapping[str, torch.Tensor], stored: Mapping[str, files.StoredTensor]
) -> Iterator[_Box]:
    """Views of what this rank writes, each with the stored tensor that it is a part of."""
    for transfer in transfers:
        box = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()
        yield transfer, stored[transfer.dst.buffer.name], box


def _as_stored(boxes: Iterable[_Box], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each box as it will be stored, with its name for messages."""
    for transfer, tensor, box in boxes:
        yield f"{transfer.tensor} as {tensor.dtype} on rank {rank}", box.to(getattr(torch, tensor.dtype))


def _write(boxes: Iterable[_Box], directory: Path) -> None:
    with publishing.BoxWriter(directory) as writer:
        for transfer, tensor, box in boxes:
            writer.write(tensor, transfer.dst, box)
        writer.flush()


def _stand_in(shape: tuple[int, ...]) -> files.StoredTensor:
    """What is planned with in place of a tensor that a checkpoint need not have, and not read."""
    return files.StoredTensor("", shape, "float32", 0)


def _hosts(job: Job) -> list[str]:
    """By rank. All ranks count as one host, which does not matter here; the files are on another."""
    return [""] * job.world_size + ["files"]


def _usual_dtype(stored: Mapping[str, files.StoredTensor]) -> str:
    """The dtype of most tensors."""
    return Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]


def _copy_companions(model_dir: str | Path | None, directory: Path, dtype: str) -> None:
    """Copy configuration and tokenizer from `model_dir`, or rewrite the configuration that is there."""
    if model_dir is not None and Path(model_dir).resolve() != directory.resolve():
        for pattern in COMPANIONS:
            for path in Path(model_dir).glob(pattern):
                if path.name != CONFIG:
                    with naming("copying", path):
                        write_bytes(directory / path.name, path.read_bytes())
    _write_config(directory if model_dir is None else Path(model_dir), directory, dtype)


def _write_config(source: Path, directory: Path, dtype: str) -> None:
    """Write the configuration of `source`, with `dtype` and without quantisation."""
    path = source / CONFIG
    if not path.is_file():
        return
    with naming("reading", path, DOWNLOAD_AGAIN):
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}, not a mapping")
    config.pop("quantization_config", None)
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    write_text(directory / path.name, json.dumps(config, indent=2) + "\n")
