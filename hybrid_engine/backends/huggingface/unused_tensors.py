"""Tensors of a checkpoint that fill no parameter: what repeats another must agree with it, all others are named."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hybrid_engine.backends.huggingface.safetensors_files import SliceReader, StoredTensor
from hybrid_engine.errors import ParameterMismatchError, clipped
from hybrid_engine.files.model_files import CONFIG
from hybrid_engine.models.table import ModelTable

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
"""The output head's canonical name, in every family."""

NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of tensors that older checkpoints carry and no model reads."""

_STEP_NBYTES = 64 << 20  # of each of two tensors, to compare them


def repetitions(table: ModelTable) -> dict[str, str]:
    """Tensor that a checkpoint may have -> the canonical tensor that it repeats: that of a tied head, and copies."""
    embedding = table.match("embedding.word_embeddings.weight")
    tied = table.dims.tied_embeddings and embedding is not None and HEAD not in {*table.shapes, *table.left_out}
    return {**table.copies, **({HEAD: embedding.packing.tensors()[0]} if tied and embedding is not None else {})}


def log_unused(directory: Path, stored: Mapping[str, StoredTensor], table: ModelTable) -> None:
    """Name what is not used, but for what repeats a tensor that is."""
    compared = _repeated(stored, table)
    if names := [name for name in stored if name not in table.shapes and name not in compared]:
        logger.info("%s: %d tensors are not used: %s", directory, len(names), clipped(", ".join(names), 1000))


def compare_repetitions(
    directory: Path, stored: Mapping[str, StoredTensor], table: ModelTable, rank: int, num_ranks: int
) -> Iterator[None]:
    """Step by step, look whether tensors that repeat others have their values, in the coarser dtype of both.

    Every rank has its share of them. At the end raises ParameterMismatchError naming those that differ.
    """
    share = sorted(_repeated(stored, table).items())[rank::num_ranks]
    findings = []
    with SliceReader(directory, sorted({stored[name].file for pair in share for name in pair})) as reader:
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


def _repeated(stored: Mapping[str, StoredTensor], table: ModelTable) -> dict[str, str]:
    return {name: original for name, original in repetitions(table).items() if name in stored and original in stored}


def _differing(reader: SliceReader, stored: Mapping[str, StoredTensor], name: str, original: str) -> Iterator[int]:
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
