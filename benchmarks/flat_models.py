"""Llama-like model of tests/gpu in both layouts, without either engine.

Megatron's side is one flat buffer per rank, with QKV interleaved by query group and gate and up
fused; vLLM's side is a separate buffer for every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.plan import Bucket
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.sides import Side

FLAT = "flat"
"""Name of the source buffer."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; the default has the width of Llama-3-8B."""

    num_layers: int = 4
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 32000

    def config(self) -> dict[str, Any]:
        """Return the sizes as a Hugging Face config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
        }


TINY = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, vocab_size=256
)


@dataclass(frozen=True)
class RankJob:
    """Part of a rank in a switch.

    Attributes:
        rank: global rank.
        source: source buffer of this rank.
        destinations: destination buffers of this rank by name.
        buckets: buckets of the plan, with the transfers that write to this rank.
    """

    rank: int
    source: Buffer
    destinations: dict[str, Buffer]
    buckets: tuple[Bucket, ...]

    @property
    def source_nbytes(self) -> int:
        return self.source.nbytes

    @property
    def destination_nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.destinations.values())

    def read_nbytes(self, src_ranks: Sequence[int]) -> int:
        """Return the bytes that this rank reads from `src_ranks`."""
        transfers = (transfer for bucket in self.buckets for transfer in bucket.transfers)
        return sum(transfer.nbytes for transfer in transfers if transfer.src_rank in src_ranks)

    def new_source(self, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
        """Allocate the source by `allocate(numel, dtype)`, with random values of a fixed seed."""
        flat = allocate(self.source.numel, torch.bfloat16)
        # the same values in every run
        generator = torch.Generator(flat.device).manual_seed(self.rank)
        return flat.normal_(generator=generator)

    def new_destinations(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate destination buffers full of NaN, a value that no source holds."""
        return {
            name: torch.full((buffer.numel,), torch.nan, dtype=torch.bfloat16, device=device)
            for name, buffer in self.destinations.items()
        }


def rank_job(shape: ModelShape, tensor: int, rank: int, bucket_nbytes: int) -> RankJob:
    """Plan the switch from TP=`tensor` on as many ranks of a host to a whole copy on each rank."""
    table = table_for(shape.config())
    training = training_side(table, TrainParallelism(tensor, tensor))
    inference = inference_side(table, InferenceParallelism(tensor))
    ranks = range(tensor)
    source = Side.of([_in_one_buffer(training.layout_of(member), member) for member in ranks])
    destination = Side.of([inference.layout_of(member) for member in ranks])
    unserved = [name for name in table.shapes if not table.is_served(name)]
    rank_plan = plan(source, destination, ["host"] * tensor, bucket_nbytes, unserved, rank)
    buckets = []
    for bucket in rank_plan.buckets:
        received = tuple(transfer for transfer in bucket.transfers if transfer.dst_rank == rank)
        if received:
            buckets.append(replace(bucket, transfers=received))
    destinations = {
        buffer_id.name: buffer
        for buffer_id, buffer in destination.buffers.items()
        if buffer_id.rank == rank
    }
    return RankJob(rank, source.buffers[BufferId(rank, FLAT)], destinations, tuple(buckets))


def _in_one_buffer(layout: Layout, rank: int) -> Layout:
    """Return the same records with all buffers concatenated, as in DDP's flat buffer."""
    starts: dict[BufferId, int] = {}
    padding: list[Extent] = []
    end = 0
    for buffer_id, buffer in layout.buffers.items():
        starts[buffer_id] = end
        padding += [Extent(end + extent.start, end + extent.stop) for extent in buffer.padding]
        end += buffer.numel
    flat = BufferId(rank, FLAT)
    shards = tuple(
        Shard(
            shard.region,
            Place(flat, starts[shard.place.buffer] + shard.place.offset, shard.place.strides),
        )
        for shard in layout.shards
    )
    return Layout(layout.tensors, {flat: Buffer(end, "bfloat16", padding=tuple(padding))}, shards)
