"""What other systems would move for the same job: formulas from their public descriptions, no measurements.

    gather                every rank receives every full tensor but what it holds of it: verl's Megatron workers with
                          mbridge (github.com/volcengine/verl, github.com/ISEEKYAN/mbridge). Dense: (1 - 1/(t*p)) * M
    gather and broadcast  tensor parallel shards are gathered to the inference shard within a stage, then each stage's
                          inference shards are broadcast to the other stages: MindSpeed-RL
                          (gitcode.com/Ascend/MindSpeed-RL, resharding). (1/tg - 1/t) * M/p + (1 - 1/p) * M/tg
    strided gather        one gather within micro data parallel groups: HybridFlow, arXiv:2409.19256, section 5.3.
                          (t*p - tg*pg) / (tg*pg*t*p) * M

    full tensors          every parameter is gathered whole on every rank, in the dtype of training, cast, and given to
                          vLLM's load_weights: verl's FSDP workers, TRL (github.com/huggingface/trl). M - held

M is the model's bytes, t and p the training sizes, tg and pg the inference sizes. Bytes are those one rank receives.
The last is for FSDP2, the others are for Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.planning.lower_bound import missing_by_rank
from hybrid_engine.planning.tensor_classes import tensor_classes
from hybrid_engine.records.holdings import Holdings
from hybrid_engine.records.owners import BoxOwners

SYMBOLS = (
    "M: bytes of the model; held: what of them a rank holds in training; t, p: tensor and pipeline parallel size in "
    "training; tg, pg: in generation."
)
"""What the formulas are made of."""


@dataclass(frozen=True, slots=True)
class PeerBytes:
    """What one rank would receive, on average; `nbytes` is None where `reason` says why the formula does not apply."""

    system: str
    formula: str
    nbytes: float | None
    reason: str = ""


def full_tensors(source: Holdings) -> PeerBytes:
    """Where every rank gathers each parameter of a sharded model."""
    received = source.model_nbytes - source.nbytes_by_rank()
    return PeerBytes("verl, TRL: full_tensor() of each parameter", "M - held", float(received.mean()))


def megatron_peers(
    source: Holdings, destination: Holdings, train: TrainParallelism, infer: InferenceParallelism
) -> list[PeerBytes]:
    """Those that train with Megatron."""
    model = destination.model_nbytes
    t, p, tg, pg = train.tensor, train.pipeline, infer.tensor, infer.pipeline
    broadcast = "(1/tg - 1/t) * M/p + (1 - 1/p) * M/tg"
    refused = list(_not_in_mindspeed(train, infer))
    stage_gather = max(1 / tg - 1 / t, 0) * model / p + (1 - 1 / p) * model / tg
    strided = "(t*p - tg*pg) / (tg*pg*t*p) * M"
    impossible = list(_not_in_hybridflow(train, infer))
    nested = (t * p - tg * pg) / (tg * pg * t * p) * model
    return [
        PeerBytes("verl with mbridge: gather", "M - held", float(_gathered(source, destination).mean())),
        _peer("MindSpeed-RL: gather and broadcast", broadcast, stage_gather, refused),
        _peer("HybridFlow: strided gather", strided, nested, impossible),
    ]


def _peer(system: str, formula: str, nbytes: float, reasons: list[str]) -> PeerBytes:
    return PeerBytes(system, formula, None, "; ".join(reasons)) if reasons else PeerBytes(system, formula, nbytes)


def _gathered(source: Holdings, destination: Holdings) -> np.ndarray:
    """Bytes each rank receives when all of every tensor goes everywhere."""
    received = np.zeros(source.num_ranks, dtype=np.int64)
    everyone = np.arange(source.num_ranks)
    for tensors in tensor_classes(source, destination):
        shape = destination.shapes[tensors.tensors[0]]
        whole = BoxOwners((0,) * len(shape), shape, everyone)
        for ranks, numel in missing_by_rank(tensors.sources, [whole], source.num_ranks):
            received[ranks] += numel * int(tensors.itemsizes.sum())
    return received


def _not_in_mindspeed(train: TrainParallelism, infer: InferenceParallelism) -> Iterator[str]:
    if train.expert > 1 or infer.expert > 1 or train.expert_cut != train.tensor:
        yield "how experts are exchanged depends on sizes that the description leaves open"
    if infer.pipeline > 1:
        yield "inference pipeline parallelism is not offered"
    if train.tensor % infer.tensor and infer.tensor % train.tensor:
        yield f"inference tensor parallel size {infer.tensor} is neither a divisor nor a multiple of {train.tensor}"


def _not_in_hybridflow(train: TrainParallelism, infer: InferenceParallelism) -> Iterator[str]:
    if train.expert > 1 or infer.expert > 1:
        yield "expert parallelism is not described"
    if train.virtual_pipeline is not None or train.pipeline_layout is not None:
        yield "virtual pipeline stages are not described"
    if infer.pipeline > 1:
        yield "inference pipeline parallelism is not offered"
    if train.tensor % infer.tensor:
        yield f"inference tensor parallel size {infer.tensor} does not divide {train.tensor}"
