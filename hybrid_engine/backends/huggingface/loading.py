"""Load training shards from a Hugging Face checkpoint, after fetching it from the Hub if needed.

A checkpoint is a layout like any other: its tensors are the buffers of one additional rank, which
no process runs. The planner determines which box of which stored tensor goes where, and finds gaps
and overlaps. Every rank reads its own boxes.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.errors import ConfigError, ParameterMismatchError, clipped
from hybrid_engine.files.checksums import CHECKSUMS, read_checksums, require_as_written
from hybrid_engine.files.documents import given_path, read_json
from hybrid_engine.files.durable import naming
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.files.model_files import CONFIG, DOWNLOAD_AGAIN
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.background import call_in_rounds
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Shard
from hybrid_engine.records.regions import LocalBox
from hybrid_engine.records.sides import Side
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.runs import strided

logger = logging.getLogger(__name__)

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of stored weights."""

HEAD = "lm_head.weight"
"""Canonical name of the output head in every family."""

_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of names of tensors in older checkpoints that no model reads."""

_REMEDY = f"Restore it from a copy; if you or another program changed it, remove {CHECKSUMS}"

_STEP_NBYTES = 64 << 20
"""Maximum bytes of each of two tensors that are compared at once."""


def fetch_weights(model: Path, job: Job, key: str = "model") -> None:
    """Download the missing files of a directory of the Hub's cache. Collective.

    The first rank of each host downloads. Any other directory is left unchanged.

    Args:
        model: directory of the model.
        job: job of all ranks.
        key: configuration key of `model`, for errors.

    Raises:
        ConfigError: the model cannot be downloaded, or ranks have different commits of it. It is
            raised on all ranks.
    """
    snapshot = HubSnapshot.at(model)
    origin = None if snapshot is None else (snapshot.repo_id, snapshot.commit)
    origins = job.agreement.gather(origin, tuple[str, str] | None, "the model")
    if len(set(origins)) > 1:
        names = {"a directory" if origin is None else "@".join(origin) for origin in origins}
        problem = f"ranks have different models: {', '.join(sorted(names))}"
        remedy = "Download one commit, and name its directory"
        if key == "model":
            remedy = "Set revision to a commit"
        raise ConfigError.of(key, problem, remedy, code="ranks-differ")
    if snapshot is None:
        return
    # The cache is on a disk of the host, and the other ranks read it after the rounds.
    is_first_of_host = job.hosts.index(job.hosts[job.rank]) == job.rank

    def download() -> None:
        if is_first_of_host:
            snapshot.download(key)

    call_in_rounds(job.agreement, "downloading the model's weights", download)


def load_pretrained(
    model: Path,
    weights: TrainingWeights,
    table: ModelTable,
    job: Job,
    *,
    key: str = "model",
) -> None:
    """Load a pretrained model, whose output head may be missing. Collective.

    Arguments and errors are those of `load_hf_checkpoint`.
    """
    may_be_new = table.may_be_new | ({HEAD} & table.shapes.keys())
    load_hf_checkpoint(model, weights, replace(table, may_be_new=may_be_new), job, key=key)


def load_hf_checkpoint(
    path: str | Path,
    weights: TrainingWeights,
    table: ModelTable,
    job: Job,
    *,
    key: str = "path",
) -> None:
    """Fill this rank's training shards from a checkpoint, on all ranks or on none. Collective.

    Stored values are cast to the dtype of the shards. Padding of the vocabulary becomes zero, and
    adapters are reset so that they add nothing. An optimizer's main parameters are not written: see
    `ActorHybridWorker.load_hf_checkpoint`.

    Faults of the files are detected before any rank changes a shard: in names, shapes, lengths, and
    in contents if there are checksums (`save_hf_checkpoint` writes them). The ranks share the files
    for this check.

    Args:
        path: directory that every rank can read, with one safetensors file or several with an
            index.
        weights: this rank's shards, on the device.
        table: name table of the model.
        job: job of all ranks.
        key: configuration key of `path`, for errors.

    Raises:
        ConfigError: the directory has no usable checkpoint, or a quantized one.
        FileError: a file is damaged or unreadable.
        ParameterMismatchError: listing every tensor that is missing, has another shape, is unknown
            to the table, or should equal another (a tied head) and differs. Other unused tensors
            are logged.
    """
    with (
        job.agreement.phase("reading the checkpoint's headers"),
        naming("reading the checkpoint", str(path)),
    ):
        directory = given_path(path, key)
        stored = files.stored_tensors(directory, key)
        _require_floats(stored, directory, key)
        layout = weights.layout()
        check_names(stored, table, directory, held=layout.tensors)
        known = {name: stored[name] for name in table.shapes if name in stored}
        # Tensors that a checkpoint may lack are planned, so that the plan has no gaps, and not
        # read.
        new = {
            name: files.StoredTensor("", table.shapes[name], "float32")
            for name in table.may_be_new
            if name not in stored
        }
        # The files are an additional rank on another host. The hosts of the ranks do not matter.
        hosts = [""] * job.world_size + ["files"]
        planned = known | new
        stored_on = dict.fromkeys(planned, job.world_size)
        source = Side.split(layout_of(planned, stored_on, {}), len(hosts))
        destination = Side.split(layout, len(hosts))
        transfers = [
            transfer
            for transfer in box_transfers(source, destination, hosts, job.rank, table.shapes)
            if transfer.tensor not in new
        ]
    weight_files = {tensor.file for tensor in stored.values()}
    job.agreement.rounds("verifying the checkpoint", _verify(directory, weight_files, job))
    comparison = compare_repetitions(directory, stored, table, job.rank, job.world_size)
    job.agreement.rounds("comparing repeated tensors", comparison)
    if job.rank == 0:
        log_unused(directory, stored, table)
    with ExitStack() as stack:
        # Until here no rank has changed a shard.
        with job.agreement.phase("preparing the weights"):
            weights.prepare()
            buffers = weights.buffers()
            file_names = sorted({known[transfer.tensor].file for transfer in transfers})
            read = stack.enter_context(files.boxes_of_files(directory, file_names))
        nbytes = sum(_stored_nbytes(transfer, known) for transfer in transfers)
        task = f"reading {directory}"
        advance = stack.enter_context(_progress(task, nbytes, is_shown=job.rank == 0))
        with torch.no_grad():
            steps = _read(transfers, buffers, known, read, advance)
            job.agreement.rounds("reading the checkpoint", steps)
        # No stored tensor has values for these.
        with job.agreement.phase("zeroing padding and adapters"):
            weights.finish_loading()
    if new and job.rank == 0:
        names = ", ".join(sorted(new))
        logger.warning("%s has no %s: new in this model, to be trained", directory, names)


def _require_floats(stored: files.StoredTensors, directory: Path, key: str) -> None:
    """Raise ConfigError for quantized weights, which are unusable without their scales."""
    quantized = [
        name
        for name, tensor in stored.items()
        if tensor.dtype not in FLOATS and not name.endswith(_NOT_WEIGHTS)
    ]
    if quantized:
        name = quantized[0]
        raise ConfigError.of(
            key,
            f"{directory} has quantised weights: {len(quantized)} tensors, e.g. {name} in "
            f"{stored[name].dtype}",
            f"Name a checkpoint in one of {', '.join(FLOATS)}",
            code="quantized-weights",
        )


def check_names(
    stored: files.StoredTensors,
    table: ModelTable,
    directory: Path,
    held: Container[str] = (),
) -> None:
    """Compare the names and shapes of stored tensors with the table.

    Args:
        stored: tensors of the checkpoint.
        table: name table of the model.
        directory: directory of the checkpoint.
        held: tensors of the trainer. A tensor that vLLM does not read (layers for multi-token
            prediction) may be missing unless the trainer has it.

    Raises:
        ParameterMismatchError: listing every missing, unknown or differently shaped tensor.
    """
    findings = []
    for name in table.shapes:
        is_needed = table.is_served(name) or name in held
        if is_needed and name not in table.may_be_new and name not in stored:
            findings.append(f"{name}: missing in the checkpoint")
    for name, shape in table.shapes.items():
        if name in stored and stored[name].shape != shape:
            findings.append(
                f"{name}: shape {stored[name].shape} in the checkpoint, expected {shape}"
            )
    known = {*table.shapes, *repetitions(table), *table.left_out}
    for name in stored:
        if name not in known and not table.is_ignored(name) and not name.endswith(_NOT_WEIGHTS):
            findings.append(f"{name}: in the checkpoint, but unknown to the model's name table")
    if findings:
        hint = _other_architecture(directory, table)
        raise ParameterMismatchError([*hint, *findings], str(directory))


def _other_architecture(directory: Path, table: ModelTable) -> Iterator[str]:
    """Yield the architecture in the checkpoint's config, if it explains other tensors."""
    try:
        names = read_json(directory / CONFIG, "path", DOWNLOAD_AGAIN).get("architectures")
    except ConfigError:
        # The findings are reported without the hint.
        return
    if isinstance(names, list) and names and table.architecture not in names:
        listed = ", ".join(map(str, names[:3]))
        yield f"{CONFIG} of the checkpoint has {listed}, this model is {table.architecture}"


def layout_of(
    stored: files.StoredTensors,
    ranks: Mapping[str, int],
    copies: Mapping[str, str],
) -> Layout:
    """Return the layout of stored tensors, each of which is a buffer.

    Args:
        stored: tensors by name.
        ranks: name -> rank that holds the tensor.
        copies: name -> name of the tensor that it repeats. A copy holds the region of that tensor.
    """
    buffers = {}
    shards = []
    shapes = {}
    for name, tensor in stored.items():
        canonical = copies.get(name, name)
        buffer = BufferId(ranks[name], name)
        buffers[buffer] = Buffer(math.prod(tensor.shape), tensor.dtype, group=canonical)
        shards.append(Shard.of(canonical, LocalBox.whole(tensor.shape), buffer))
        if name not in copies:
            shapes[name] = tensor.shape
    return Layout(shapes, buffers, tuple(shards))


def _verify(directory: Path, names: set[str], job: Job) -> Iterator[None]:
    """Compare all files with their checksums, if there are any: each rank its share.

    Without an entry a file of weights would be read unverified. Yields after each file.
    """
    if (directory / CHECKSUMS).is_file():
        checksums = read_checksums(directory, _REMEDY, follow_links=True)
        for name in sorted({*names, *checksums})[job.rank :: job.world_size]:
            # Files of the Hub's cache are links.
            require_as_written((directory / name).resolve(), checksums.get(name, "none"), _REMEDY)
            yield


@contextmanager
def _progress(task: str, nbytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading `nbytes` on stderr if it is a terminal; else log the task.

    Yields a function to call with the number of bytes read since its last call.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    is_terminal = sys.stderr.isatty()
    if is_shown and not is_terminal:
        logger.info("%s: %.1f GB on this rank", task, nbytes / 1e9)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (is_shown and is_terminal),
    ) as progress:
        yield partial(progress.advance, progress.add_task(task, total=nbytes))


def _stored_nbytes(transfer: Transfer, stored: files.StoredTensors) -> int:
    return transfer.numel * DTYPE_NBYTES[stored[transfer.tensor].dtype]


def _read(
    transfers: list[Transfer],
    buffers: FlatBuffers,
    stored: files.StoredTensors,
    read: files.ReadBox,
    advance: Callable[[int], None],
) -> Iterator[None]:
    """Read boxes into the buffers. Yields after each box."""
    for transfer in transfers:
        tensor = stored[transfer.tensor]
        flat = buffers[transfer.dst.buffer.name]
        target = strided(flat, transfer.lengths, transfer.dst)
        target.copy_(_read_box(transfer, tensor, read))
        advance(_stored_nbytes(transfer, stored))
        yield


def _read_box(transfer: Transfer, tensor: files.StoredTensor, read: files.ReadBox) -> torch.Tensor:
    """Read the box of a transfer, which may be one of a finer shape than the stored one."""
    # Stored tensors are contiguous, so the flat offset of an element determines its indices.
    last = transfer.src.extent(transfer.lengths).stop - 1
    ends = [np.unravel_index(place, tensor.shape) for place in (transfer.src.offset, last)]
    first, final = (tuple(map(int, end)) for end in ends)
    lengths = tuple(end - start + 1 for start, end in zip(first, final, strict=True))
    box = read(transfer.tensor, tensor, first, lengths)
    if lengths == transfer.lengths:
        return box
    # Elements between those of the box were read with it.
    strides = []
    for length, stride in zip(transfer.lengths, transfer.src.strides, strict=True):
        # A dim of one index has no steps.
        index = np.unravel_index(stride if length > 1 else 0, tensor.shape)
        steps = zip(index, box.stride(), strict=True)
        strides.append(sum(int(step) * unit for step, unit in steps))
    return box.as_strided(transfer.lengths, strides, box.storage_offset())


# -- tensors that fill no parameter ----------------------------------------------------------------


def repetitions(table: ModelTable) -> dict[str, str]:
    """Return optional tensors of a checkpoint, and the canonical tensor that each repeats.

    They are the head of a model with tied embeddings, and the table's copies.
    """
    repeated = dict(table.copies)
    embedding = table.match("embedding.word_embeddings.weight")
    # A table that lists the head, or leaves it out, has a rule for it already.
    has_rule = HEAD in {*table.shapes, *table.left_out}
    if table.dims.tied_embeddings and embedding is not None and not has_rule:
        repeated[HEAD] = embedding.packing.tensors()[0]
    return repeated


def log_unused(directory: Path, stored: files.StoredTensors, table: ModelTable) -> None:
    """Log the tensors of a checkpoint that are not used and repeat no other tensor."""
    compared = _stored_repetitions(stored, table)
    names = [name for name in stored if name not in table.shapes and name not in compared]
    if names:
        listed = clipped(", ".join(names), 1000)
        logger.info("%s: %d tensors are not used: %s", directory, len(names), listed)


def compare_repetitions(
    directory: Path,
    stored: files.StoredTensors,
    table: ModelTable,
    rank: int,
    num_ranks: int,
) -> Iterator[None]:
    """Compare this rank's share of the tensors that repeat others with the originals.

    Values are compared in the coarser of the two dtypes. Yields after each part of a tensor.

    Raises:
        ParameterMismatchError: after all comparisons, listing every tensor that differs.
    """
    # Sorted, so that the ranks agree on the shares.
    share = sorted(_stored_repetitions(stored, table).items())[rank::num_ranks]
    file_names = {stored[name].file for pair in share for name in pair}
    findings = []
    with files.boxes_of_files(directory, sorted(file_names)) as read:
        for name, original in share:
            num_differing = 0
            for count in _differing_counts(read, stored, name, original):
                num_differing += count
                yield
            if num_differing:
                findings.append(
                    f"{name}: {num_differing} elements differ from {original}, which is used in "
                    f"its place: {CONFIG} ties them. Correct tie_word_embeddings there, or remove "
                    "this tensor"
                )
    if findings:
        raise ParameterMismatchError(findings, str(directory))


def _stored_repetitions(stored: files.StoredTensors, table: ModelTable) -> dict[str, str]:
    return {
        name: original
        for name, original in repetitions(table).items()
        if name in stored and original in stored
    }


def _differing_counts(
    read: files.ReadBox,
    stored: files.StoredTensors,
    name: str,
    original: str,
) -> Iterator[int]:
    """Yield the number of differing elements of each part of two tensors.

    If the shapes differ, all elements do.
    """
    copy = stored[name]
    shape = copy.shape
    if shape != stored[original].shape:
        yield math.prod(shape)
        return
    # As many rows at once as fit in _STEP_NBYTES of the wider dtype.
    largest_nbytes = max(copy.nbytes, stored[original].nbytes, 1)
    rows = max(1, _STEP_NBYTES * shape[0] // largest_nbytes)
    for start in range(0, shape[0], rows):
        lengths = (min(rows, shape[0] - start), *shape[1:])
        offsets = (start, *(0 for _ in shape[1:]))
        first = read(name, copy, offsets, lengths)
        second = read(original, stored[original], offsets, lengths)
        # float16 and bfloat16 have the same size; bfloat16 is the coarser one.
        coarser = min(
            first.dtype,
            second.dtype,
            key=lambda dtype: (dtype.itemsize, -torch.finfo(dtype).eps),
        )
        yield int((first.to(coarser) != second.to(coarser)).sum())
