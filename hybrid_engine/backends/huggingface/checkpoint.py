"""Training shards from a Hugging Face checkpoint, and a checkpoint from training shards.

A checkpoint is a layout like any other: its tensors are buffers of one more rank, which no process runs. So the planner
says which box of which stored tensor goes where, finds gaps and overlaps, and picks among replicas who writes what.
Every rank reads or writes its own boxes and nothing else; nothing is gathered.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from hybrid_engine.agreement import Agreement
from hybrid_engine.backends.huggingface import files
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.regions import Region, contiguous_strides
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.transports.copies import strided

FILE_NBYTES = 5 * 10**9
"""Data per file of a saved checkpoint, as transformers has it."""

NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of tensors that older checkpoints carry and no model reads."""

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "*token*.json",
    "tokenizer.model",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)
"""Files that belong to a model beside its weights."""

_SUFFIX = ".incomplete"


class LoadableWeights(TrainingWeights, Protocol):
    """Training weights that a checkpoint can be read into."""

    def zero_padding(self) -> None:
        """Zero what no weight covers."""
        ...

    def zero_adapters(self) -> None:
        """Make adapters add nothing."""
        ...


def load_hf_checkpoint(path: str | Path, weights: LoadableWeights, table: ModelTable, agreement: Agreement) -> None:
    """Fill this rank's training shards from a checkpoint; on all ranks or on none. Collective.

    Args:
        path: directory with safetensors files, one or many with an index, that every rank can read.
        weights: the shards, on the device.
        table: the model's name table.
        agreement: of all ranks.

    Stored values are cast to the shards' dtype. Padding (of the vocabulary) becomes zero, and adapters add nothing.
    Main parameters of an optimizer are not touched: see `ActorHybridWorker.load_hf_checkpoint`. Raises ConfigError, or
    ParameterMismatchError naming every tensor that is missing, has another shape or is unknown to the table.
    """
    directory = Path(path)
    with agreement.phase("reading the checkpoint's headers"):
        stored = files.stored_tensors(directory)
        _check_names(stored, table)
        known = {name: stored[name] for name in table.shapes}
        rank = dist.get_world_size()
        transfers = plan(
            _layout_of(known, rank, {}), weights.layout(), _hosts(), may_stay_unread=table.shapes
        ).transfers()
    with agreement.phase("preparing the weights"):
        weights.prepare()
    buffers = weights.buffers()
    with agreement.phase("reading the checkpoint"), torch.no_grad(), files.SliceReader(directory) as reader:
        for transfer in transfers:
            strides = contiguous_strides(known[transfer.tensor].shape)
            offsets = _unravel(transfer.src.offset, strides)
            box = reader.read(transfer.tensor, known[transfer.tensor], offsets, transfer.lengths)
            strided(buffers[transfer.dst.buffer.name], transfer.lengths, transfer.dst).copy_(box)
        weights.zero_padding()
        weights.zero_adapters()


def save_hf_checkpoint(
    path: str | Path,
    weights: TrainingWeights,
    table: ModelTable,
    agreement: Agreement,
    model_dir: str | Path | None = None,
    dtype: str | None = None,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write the training shards as a checkpoint that transformers and vLLM load. Collective.

    Args:
        path: directory on storage that all ranks share; made if missing. Weights of an older save are replaced.
        weights: the shards, on the device.
        table: the model's name table.
        agreement: of all ranks.
        model_dir: configuration and tokenizer are copied from here.
        dtype: of the stored weights, e.g. "bfloat16"; default: that of the shards.
        file_nbytes: most bytes of data in one file.

    Every rank writes its share of the replicas in place. Files appear under their names once all are complete.
    """
    with agreement.phase("preparing the weights"):
        weights.prepare()
        own = weights.layout()
    layouts = agreement.gather(own, "save_hf_checkpoint")
    directory, rank = Path(path), dist.get_rank()
    with agreement.phase("planning the checkpoint"):
        source = Layout.merge(layouts)
        stored = files.plan_files(_tensors_to_store(source, table, dtype), file_nbytes)
        destination = _layout_of(stored, dist.get_world_size(), table.copies)
        transfers = [part for part in plan(source, destination, _hosts()).transfers() if part.src_rank == rank]
    try:
        with agreement.phase("creating the checkpoint's files"):
            if rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                files.create_files(directory, stored, _SUFFIX)
        with agreement.phase("writing the checkpoint"), torch.no_grad():
            _write(transfers, weights.buffers(), files.open_for_writing(directory, stored, _SUFFIX))
        with agreement.phase("publishing the checkpoint"):
            if rank == 0:
                _copy_companions(model_dir, directory, stored)
                files.publish_files(directory, stored, _SUFFIX)
    except BaseException:
        if rank == 0:
            files.remove_unpublished(directory, {tensor.file for tensor in stored.values()}, _SUFFIX)
        raise


def _check_names(stored: Mapping[str, files.StoredTensor], table: ModelTable) -> None:
    findings = [f"{name}: not in the checkpoint" for name in table.shapes if name not in stored]
    findings += [
        f"{name}: shape {stored[name].shape} in the checkpoint, {shape} by the model's configuration"
        for name, shape in table.shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    for name in stored:
        is_copy = name in table.copies or (table.dims.tied_embeddings and name == "lm_head.weight")
        if name not in table.shapes and not is_copy and not name.endswith(NOT_WEIGHTS):
            findings.append(f"{name}: in the checkpoint, but the model's name table has no such tensor")
    if findings:
        raise ParameterMismatchError(findings)


def _tensors_to_store(source: Layout, table: ModelTable, dtype: str | None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) in the checkpoint's order, copies last."""
    held_in = {shard.region.tensor: source.buffers[shard.place.buffer].dtype for shard in source.shards}
    if missing := [name for name in table.shapes if name not in held_in]:
        raise ParameterMismatchError([f"{name}: no training rank holds it" for name in missing])
    stored = {name: (shape, table.dtypes.get(name) or dtype or held_in[name]) for name, shape in table.shapes.items()}
    return stored | {copy: stored[name] for copy, name in table.copies.items()}


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


def _write(transfers: list[Transfer], buffers: Mapping[str, torch.Tensor], mapped: Mapping[str, torch.Tensor]) -> None:
    for transfer in transfers:
        source = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src)
        strided(mapped[transfer.dst.buffer.name], transfer.lengths, transfer.dst).copy_(source)


def _unravel(position: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for stride in strides:
        index.append(position // stride)
        position %= stride
    return tuple(index)


def _hosts() -> list[str]:
    """Host names by rank: files are on none of them."""
    return [""] * dist.get_world_size() + ["files"]


def _copy_companions(model_dir: str | Path | None, directory: Path, stored: Mapping[str, files.StoredTensor]) -> None:
    """Configuration and tokenizer; the config says what is stored: the dtype of most weights, and no quantisation."""
    if model_dir is None:
        return
    if Path(model_dir).resolve() != directory.resolve():
        for pattern in COMPANIONS:
            for path in Path(model_dir).glob(pattern):
                shutil.copyfile(path, directory / path.name)
    path = directory / "config.json"
    if path.is_file():
        config = json.loads(path.read_text())
        config.pop("quantization_config", None)
        dtypes = Counter(tensor.dtype for tensor in stored.values())
        config["dtype" if "dtype" in config else "torch_dtype"] = dtypes.most_common(1)[0][0]
        path.write_text(json.dumps(config, indent=2) + "\n")
