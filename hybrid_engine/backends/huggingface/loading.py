"""Training shards from a Hugging Face checkpoint, which may have to be fetched from the Hub first.

A checkpoint is a layout like any other: its tensors are buffers of one more rank, which no process runs. So the planner
says which box of which stored tensor goes where, finds gaps and overlaps, and every rank reads its own boxes.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.errors import ConfigError, ParameterMismatchError, Violation, clipped
from hybrid_engine.files.checksums import CHECKSUMS, read_checksums, require_as_written
from hybrid_engine.files.documents import given_path, read_json
from hybrid_engine.files.durable import naming
from hybrid_engine.files.hub import Snapshot
from hybrid_engine.files.model_files import CONFIG, DOWNLOAD_AGAIN
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import LoadableWeights
from hybrid_engine.ranks.background import in_background, steps_until
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.records.sides import Side
from hybrid_engine.transports.copies import strided

logger = logging.getLogger(__name__)

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that weights can be stored in."""

HEAD = "lm_head.weight"
"""The output head's canonical name, in every family."""

_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of tensors that older checkpoints carry and no model reads."""

_REMEDY = f"Restore it from a copy; if another program wrote it, remove {CHECKSUMS}"
_STEP_NBYTES = 64 << 20  # of each of two tensors, to compare them


def fetch_weights(model: Path, job: Job, key: str = "model") -> None:
    """Download what a directory of the Hub's cache lacks; the first rank of each host does. Collective.

    Nothing happens to any other directory. `key`: names the model. Raises ConfigError on all ranks, also where they
    have different commits.
    """
    snapshot = Snapshot.at(model)
    own = None if snapshot is None else (snapshot.repo_id, snapshot.commit)
    origins = job.agreement.gather(own, tuple[str, str] | None, "the model")
    if len(set(origins)) > 1:
        found = ", ".join(sorted({"a directory" if one is None else "@".join(one) for one in origins}))
        remedy = "Set revision to a commit" if key == "model" else "Download one commit, and name its directory"
        raise ConfigError([Violation(key, f"ranks have different models: {found}", remedy)])
    if snapshot is not None:
        is_first = job.hosts.index(job.hosts[job.rank]) == job.rank
        steps = steps_until(in_background(partial(snapshot.download, key), "download"), 1) if is_first else ()
        job.agreement.rounds("downloading the model's weights", steps)


def load_pretrained(model: Path, weights: LoadableWeights, table: ModelTable, job: Job, *, key: str = "model") -> None:
    """Read a model's weights into the shards; an output head may be new. `key`: names the model. Collective.

    Errors as of `load_hf_checkpoint`.
    """
    may_be_new = table.may_be_new | ({HEAD} & table.shapes.keys())
    load_hf_checkpoint(model, weights, replace(table, may_be_new=may_be_new), job, key=key)


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
        check_names(stored, table, directory, held=own.tensors)
        known = {name: stored[name] for name in table.shapes if name in stored}
        # what a checkpoint need not have is planned too, and not read
        new = {
            name: files.StoredTensor("", table.shapes[name], "float32")
            for name in table.may_be_new
            if name not in stored
        }
        hosts = [""] * job.world_size + ["files"]  # that the ranks are on several does not matter here
        stored_on = dict.fromkeys(known | new, job.world_size)
        source = Side.split(layout_of(known | new, stored_on, {}), len(hosts))
        transfers = box_transfers(source, Side.split(own, len(hosts)), hosts, job.rank, table.shapes)
        transfers = [transfer for transfer in transfers if transfer.tensor not in new]
    own_share = sorted({tensor.file for tensor in stored.values()})[job.rank :: job.world_size]
    job.agreement.rounds("verifying the checkpoint", _verify(directory, own_share))
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


def _require_floats(stored: Mapping[str, files.StoredTensor], directory: Path, key: str) -> None:
    """Raise ConfigError for quantised weights, which mean nothing without their scales."""
    weights = {name: tensor.dtype for name, tensor in stored.items() if not name.endswith(_NOT_WEIGHTS)}
    if strange := {name: dtype for name, dtype in weights.items() if dtype not in FLOATS}:
        name, dtype = next(iter(strange.items()))
        problem = f"{directory} has quantised weights: {len(strange)} tensors, e.g. {name} in {dtype}"
        raise ConfigError([Violation(key, problem, f"Name a checkpoint in one of {', '.join(FLOATS)}")])


def check_names(
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
        if name not in known and not name.endswith(_NOT_WEIGHTS):
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


def layout_of(stored: Mapping[str, files.StoredTensor], ranks: Mapping[str, int], copies: Mapping[str, str]) -> Layout:
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
    is_there = (directory / CHECKSUMS).is_file()
    checksums = read_checksums(directory, _REMEDY, follow_links=True) if is_there else {}
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
    for transfer in transfers:
        tensor = stored[transfer.tensor]
        # stored tensors are contiguous, so the first element's position says where in the tensor the box begins
        offsets = tuple(int(index) for index in np.unravel_index(transfer.src.offset, tensor.shape))
        box = reader.read(transfer.tensor, tensor, offsets, transfer.lengths)
        strided(buffers[transfer.dst.buffer.name], transfer.lengths, transfer.dst).copy_(box)
        advance(_stored_nbytes(transfer, stored))
        yield


# -- tensors that fill no parameter ------------------------------------------------------------------------------------


def repetitions(table: ModelTable) -> dict[str, str]:
    """Tensor that a checkpoint may have -> the canonical tensor that it repeats: that of a tied head, and copies."""
    embedding = table.match("embedding.word_embeddings.weight")
    tied = table.dims.tied_embeddings and embedding is not None and HEAD not in {*table.shapes, *table.left_out}
    return {**table.copies, **({HEAD: embedding.packing.tensors()[0]} if tied and embedding is not None else {})}


def log_unused(directory: Path, stored: Mapping[str, files.StoredTensor], table: ModelTable) -> None:
    """Name what is not used, but for what repeats a tensor that is."""
    compared = _repeated(stored, table)
    if names := [name for name in stored if name not in table.shapes and name not in compared]:
        logger.info("%s: %d tensors are not used: %s", directory, len(names), clipped(", ".join(names), 1000))


def compare_repetitions(
    directory: Path, stored: Mapping[str, files.StoredTensor], table: ModelTable, rank: int, num_ranks: int
) -> Iterator[None]:
    """Step by step, look whether tensors that repeat others have their values, in the coarser dtype of both.

    Every rank has its share of them. At the end raises ParameterMismatchError naming those that differ.
    """
    share = sorted(_repeated(stored, table).items())[rank::num_ranks]
    findings = []
    with files.SliceReader(directory, sorted({stored[name].file for pair in share for name in pair})) as reader:
        for name, original in share:
            differing = 0
            for count in _differing(reader, stored, name, original):
                differing += count
                yield
            if differing:
                findings.append(
                    f"{name}: {differing} elements differ from {original}, which is used in its place: {CONFIG} ties "
                    "them. Correct tie_word_embeddings there, or remove this tensor"
                )
    if findings:
        raise ParameterMismatchError(findings, str(directory))


def _repeated(stored: Mapping[str, files.StoredTensor], table: ModelTable) -> dict[str, str]:
    return {name: original for name, original in repetitions(table).items() if name in stored and original in stored}


def _differing(
    reader: files.SliceReader, stored: Mapping[str, files.StoredTensor], name: str, original: str
) -> Iterator[int]:
    """By parts, how many elements differ; all of another shape do."""
    one, other = stored[name], stored[original]
    if one.shape != other.shape:
        yield math.prod(one.shape)
        return
    rows = max(1, _STEP_NBYTES * one.shape[0] // max(one.nbytes, other.nbytes, 1))
    for start in range(0, one.shape[0], rows):
        lengths = (min(rows, one.shape[0] - start), *one.shape[1:])
        offsets = (start, *(0 for _ in one.shape[1:]))
        parts: Sequence[torch.Tensor] = [reader.read(key, stored[key], offsets, lengths) for key in (name, original)]
        coarser = min((part.dtype for part in parts), key=_precision)
        yield int((parts[0].to(coarser) != parts[1].to(coarser)).sum())


def _precision(dtype: torch.dtype) -> tuple[int, float]:
    return dtype.itemsize, -torch.finfo(dtype).eps
