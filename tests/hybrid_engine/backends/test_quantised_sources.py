"""Quantised weights, made of records in any layout, equal the published recipe bit by bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.computed_sources import AdaptorWithSources
from hybrid_engine.backends.quantised_sources import QuantisedSources, quantise
from hybrid_engine.backends.training_side import layout_in
from hybrid_engine.errors import HybridEngineError, WeightError
from hybrid_engine.models.block_quantization import BlockQuantization, Blocks, scale_name
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from hybrid_engine.transports.copies import strided
from tests.harness.launch import Outcomes, Ranks
from tests.harness.torch_modes import other_torch_modes
from tests.zoo import block_fp8

SHAPES = {"a.weight": (300, 200), "b.weight": (256, 384), "norm.weight": (40, 3)}
QUANTIZATION = BlockQuantization(frozenset({"a.weight", "b.weight", "of another rank.weight"}), Blocks(128, 128))

Box = tuple[tuple[int, int], tuple[int, int]]
"""Offsets and lengths."""


def values(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return weights with a block of zeros, one of tiny values, and one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["b.weight"][:128, :128] = 0
    tensors["b.weight"][128:, :128] *= 1e-38
    tensors["b.weight"][5, 200] = -1e4
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


class Parts(AdaptorWithSources):
    """Weights of which a rank holds some boxes, one after the other in a buffer; `b` is stored transposed."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]], dtype: torch.dtype = torch.bfloat16, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.whole = values(dtype)
        self.shards = []
        self.flat = torch.zeros(400_000, dtype=dtype)
        start = 7
        for name, of_tensor in boxes.items():
            for offsets, lengths in of_tensor:
                strides = contiguous_strides(lengths)
                if name == "b.weight":
                    strides = contiguous_strides(lengths[::-1])[::-1]
                shard = Shard(Region(name, offsets, lengths), Place(BufferId(rank, "weights"), start, strides))
                self.shards.append(shard)
                strided(self.flat, lengths, shard.place).copy_(part_of(self.whole[name], shard.region))
                start += lengths[0] * lengths[1]

    def own_layout(self) -> Layout:
        return layout_in(self.buffers(), self.rank, SHAPES, self.shards)

    def own_origins(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return {shard.region.tensor: [self.flat] for shard in self.shards}

    def stored_buffers(self) -> Mapping[str, torch.Tensor]:
        return {"weights": self.flat}

    def finish_pending(self) -> None: ...

    def described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "the weights", self.flat


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(low, end) for low, end in zip(region.offsets, region.ends, strict=True))]


def differing(weights: Parts) -> list[str]:
    """Return the shown regions that differ from the recipe, which quantises whole weights; also if none is shown."""
    buffers = weights.buffers()
    expected = block_fp8.quantised_checkpoint(weights.whole, ["a.weight", "b.weight"])
    shards = weights.layout().shards
    wrong = [] if any(shard.region.tensor == scale_name("b.weight") for shard in shards) else ["no scales"]
    for shard in shards:
        shown = strided(buffers[shard.place.buffer.name], shard.region.lengths, shard.place)
        part = part_of(expected[shard.region.tensor], shard.region)
        if shown.dtype != part.dtype or not torch.equal(shown.float(), part.float()):
            wrong.append(str(shard.region))
    return wrong


# Boxes that together hold whole blocks.
WHOLE: Mapping[str, Sequence[Box]] = {
    "a.weight": [((0, 0), (70, 200)), ((70, 0), (186, 100)), ((70, 100), (186, 100)), ((256, 0), (44, 200))],
    "b.weight": [((0, 0), (256, 384))],
    "norm.weight": [((0, 0), (40, 3))],
}
CUT: Sequence[Mapping[str, Sequence[Box]]] = [
    {"a.weight": [((0, 0), (150, 200))], "b.weight": [((0, 0), (256, 190))], "norm.weight": [((0, 0), (40, 3))]},
    {"a.weight": [((150, 0), (150, 200))], "b.weight": [((0, 190), (256, 194))]},
]
"""Boxes of two ranks, cut in the middle of blocks."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_scales_equal_the_published_recipe(dtype: torch.dtype) -> None:
    weights = Parts(WHOLE, dtype)
    view = quantise(weights, QUANTIZATION)
    assert view.cut == set()
    for _ in range(2):
        with other_torch_modes():
            weights.prepare()
        assert differing(weights) == []


def test_the_layout_shows_quantised_tensors_and_the_others() -> None:
    weights = Parts(WHOLE)
    quantise(weights, QUANTIZATION)
    layout = weights.layout()
    dtypes = {shard.region.tensor: layout.buffers[shard.place.buffer].dtype for shard in layout.shards}
    assert dtypes == {
        **{"a.weight": "float8_e4m3fn", "b.weight": "float8_e4m3fn", "norm.weight": "bfloat16"},
        **{"a.weight_scale_inv": "float32", "b.weight_scale_inv": "float32"},
    }
    assert layout.tensors["a.weight_scale_inv"] == (3, 2)
    assert weights.origins().keys() == dtypes.keys()
    assert weights.scratch == {"quantised weights in float8_e4m3fn", "quantised weights in float32"}


def test_weights_that_cannot_be_used_are_found_before_they_are_quantised() -> None:
    weights = Parts(WHOLE)
    quantise(weights, QUANTIZATION)
    weights.flat[9] = torch.inf
    weights.prepare()
    with pytest.raises(WeightError, match="the weights: 1 Inf"):
        weights.check_values()


@pytest.mark.parametrize(("rank", "tensors"), [(0, {"a.weight", "b.weight"}), (1, {"a.weight", "b.weight"})])
def test_cut_blocks_are_known_before_any_collective(rank: int, tensors: set[str]) -> None:
    assert quantise(Parts(CUT[rank]), QUANTIZATION).cut == tensors


def quantise_in_parts() -> tuple[list[str], list[str]]:
    """Return the regions that differ from the recipe, with and without scales over all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = Parts(CUT[rank], rank=rank)
    view = quantise(weights, QUANTIZATION)
    weights.prepare()
    alone = differing(weights)
    with closing(Job.join(60)) as job:
        share(view, job)
        weights.prepare()
    return differing(weights), alone


def share(view: QuantisedSources, job: Job) -> None:
    # Neither rank holds a part of the last one.
    names = {"a.weight", "b.weight", "c.weight"}
    view.share(names, {**SHAPES, "c.weight": (128, 128)}, job.agreement)


def fail_before_sharing() -> list[tuple[float, str]]:
    """Return seconds and errors if rank 1 fails before its weights are final, and while it computes."""
    failures = []
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = Parts(CUT[rank], rank=rank)
    with closing(Job.join(60)) as job:
        share(quantise(weights, QUANTIZATION), job)
        for target, name in ((weights, "finish_pending"), (QuantisedSources, "_largest_of")):
            error = MemoryError("no memory") if rank == 1 else None
            patched = mock.patch.object(target, name, side_effect=error) if error else nullcontext()
            start = time.monotonic()
            with pytest.raises(HybridEngineError) as caught, patched, job.agreement.phase("prepare", 30):
                weights.prepare()
            failures.append((time.monotonic() - start, f"{type(caught.value).__name__}: {caught.value}"))
            with job.agreement.phase("prepare"):
                weights.prepare()
            assert differing(weights) == []
    return failures


@pytest.fixture(scope="module")
def outcomes(engines: Ranks) -> Outcomes:
    return engines.launch_in_turn(2, {"parts": (quantise_in_parts, ()), "failing": (fail_before_sharing, ())})


def test_ranks_share_the_scales_of_cut_blocks(outcomes: Outcomes) -> None:
    assert [shared for shared, _ in outcomes["parts"]] == [[], []]
    _, alone = outcomes["parts"][0]
    assert any("b.weight" in region for region in alone)  # the outlier is on the other rank


def test_a_rank_that_fails_before_scales_are_shared_ends_the_phase_on_all_ranks(outcomes: Outcomes) -> None:
    other, failing = outcomes["failing"]
    for seconds, text in (*other, *failing):
        assert "MemoryError: no memory" in text
        assert seconds < 10
    assert all(text.startswith("RemoteError: ") for _, text in other)
