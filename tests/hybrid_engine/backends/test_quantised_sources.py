"""Quantised weights, made of records in any layout, equal those of the writers of checkpoints bit
by bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.computed_sources import AdaptorWithSources
from hybrid_engine.backends.quantised_sources import GROUP, QuantisedSources, quantise
from hybrid_engine.backends.training_side import layout_in
from hybrid_engine.errors import ConfigError, ReshardError
from hybrid_engine.models.block_quantization import BlockQuantization
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides
from tests.harness.errors import failing, has_violation
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.torch_modes import other_torch_modes
from tests.hybrid_engine.backends.test_block_arithmetic import FORMATS
from tests.zoo import block_formats
from tests.zoo.megatron_models import region_slices, view_of

SHAPES = {"a.weight": (300, 192), "b.weight": (256, 384), "norm.weight": (40, 3)}
# vLLM fuses `a` and `b`.
GROUPS = {
    "a.weight": "a.weight",
    "b.weight": "a.weight",
    "of another rank.weight": "of another rank.weight",
}

Box = tuple[tuple[int, int], tuple[int, int]]
"""Offsets and lengths."""


def values(dtype: torch.dtype = torch.bfloat16) -> TensorDict:
    """Return weights with a block of zeros, one of tiny values, and one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["b.weight"][:128, :128] = 0
    tensors["b.weight"][128:, :128] *= 1e-38
    tensors["b.weight"][5, 200] = -1e4
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


class Parts(AdaptorWithSources):
    """Weights of which a rank holds some boxes, one after the other in a buffer; `b` is stored
    transposed.
    """

    def __init__(
        self, boxes: Mapping[str, Sequence[Box]], dtype: torch.dtype = torch.bfloat16, rank: int = 0
    ) -> None:
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
                shard = Shard(
                    Region(name, offsets, lengths), Place(BufferId(rank, "weights"), start, strides)
                )
                self.shards.append(shard)
                view_of(self.stored_buffers(), shard).copy_(self.whole[name][region_slices(shard)])
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


def quantised(weights: Parts, method: str) -> QuantisedSources:
    return quantise(weights, BlockQuantization(GROUPS, FORMATS[method]))


def stored(weights: Parts, method: str) -> TensorDict:
    """Return the tensors of a published checkpoint."""
    tensors = {"norm.weight": weights.whole["norm.weight"]}
    largest = max(float(weights.whole[name].abs().max()) for name in ("a.weight", "b.weight"))
    for module in ("a", "b"):
        of_weight = block_formats.quantised(method, weights.whole[f"{module}.weight"], largest)
        tensors |= {f"{module}.{end}": tensor for end, tensor in of_weight.items()}
    return tensors


def differing(weights: Parts, method: str) -> list[str]:
    """Return the shown regions that differ from the checkpoint's, whose weights are quantised as a
    whole.
    """
    buffers = weights.buffers()
    expected = stored(weights, method)
    shards = weights.layout().shards
    wrong = sorted(
        {name for name in expected if name[0] == "b"} - {shard.region.tensor for shard in shards}
    )
    for shard in shards:
        shown = view_of(buffers, shard)
        part = expected[shard.region.tensor][region_slices(shard)]
        if shown.dtype != part.dtype or not torch.equal(shown.float(), part.float()):
            wrong.append(str(shard.region))
    return wrong


# Boxes that together hold whole blocks.
WHOLE: Mapping[str, Sequence[Box]] = {
    "a.weight": [
        ((0, 0), (70, 192)),
        ((70, 0), (186, 100)),
        ((70, 100), (186, 92)),
        ((256, 0), (44, 192)),
    ],
    "b.weight": [((0, 0), (256, 384))],
    "norm.weight": [((0, 0), (40, 3))],
}
CUT: Sequence[Mapping[str, Sequence[Box]]] = [
    {
        "a.weight": [((0, 0), (150, 192))],
        "b.weight": [((0, 0), (256, 190))],
        "norm.weight": [((0, 0), (40, 3))],
    },
    {"a.weight": [((150, 0), (150, 192))], "b.weight": [((0, 190), (256, 194))]},
]
"""Boxes of two ranks, cut in the middle of blocks."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", FORMATS)
def test_values_and_scales_equal_those_of_a_published_checkpoint(
    method: str, dtype: torch.dtype
) -> None:
    weights = Parts(WHOLE, dtype)
    view = quantised(weights, method)
    assert view.cut == set()
    for _ in range(2):
        with other_torch_modes():
            weights.prepare()
        assert differing(weights, method) == []


@pytest.mark.parametrize("method", FORMATS)
def test_the_layout_shows_quantised_tensors_and_the_others(method: str) -> None:
    weights = Parts(WHOLE)
    quantised(weights, method)
    layout = weights.layout()
    dtypes = {
        shard.region.tensor: layout.buffers[shard.place.buffer].dtype for shard in layout.shards
    }
    expected = stored(weights, method)
    assert dtypes == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in expected.items()
    }
    assert layout.tensors == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert weights.origins().keys() == dtypes.keys()
    assert weights.scratch == {
        f"quantised weights in {dtype}" for dtype in set(dtypes.values()) - {"bfloat16"}
    }


def test_elements_that_share_a_byte_are_on_one_rank() -> None:
    weights = Parts({"b.weight": [((0, 0), (256, 191))]})
    refused = has_violation("generate_config.quantization", "cut-in-a-byte", "b.weight", "0 to 191")
    with pytest.raises(ConfigError, check=refused):
        quantised(weights, "nvfp4")
    assert quantised(weights, "mxfp8").cut == {"b.weight"}


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_cut_blocks_and_groups_are_known_before_any_collective(rank: int, method: str) -> None:
    cut = quantised(Parts(CUT[rank]), method).cut
    # Rows are cut between blocks of one row.
    expected = {"fp8": {"a.weight", "b.weight"}, "nvfp4": {"b.weight", f"a.weight{GROUP}"}}
    assert cut == expected.get(method, {"b.weight"})


def parts_of_rank(method: str, job: Job) -> tuple[Parts, QuantisedSources]:
    weights = Parts(CUT[job.rank], rank=job.rank)
    return weights, quantised(weights, method)


def share(view: QuantisedSources, job: Job) -> None:
    # Neither rank holds a part of the last one.
    view.share(view.cut | {"c.weight"}, {**SHAPES, "c.weight": (128, 128)}, job.agreement)


@on_engines(2)
@pytest.mark.parametrize("method", FORMATS)
def test_ranks_share_the_scales_of_cut_blocks(method: str) -> None:
    with closing(Job.join(60)) as job:
        weights, view = parts_of_rank(method, job)
        weights.prepare()
        # The outlier is on the other rank.
        alone = of_all_ranks(differing(weights, method))
        assert any("b.weight" in region for regions in alone for region in regions)
        share(view, job)
        weights.prepare()
        assert differing(weights, method) == []


@on_engines(2)
def test_a_rank_that_fails_before_scales_are_shared_ends_the_phase_on_all_ranks() -> None:
    """Rank 1 fails before its weights are final, then while it computes."""
    with closing(Job.join(60)) as job:
        weights, view = parts_of_rank("fp8", job)
        share(view, job)
        for target, name in ((weights, "finish_pending"), (QuantisedSources, "_largest_of")):
            fails = mock.patch.object(target, name, side_effect=MemoryError("no memory"))
            start = time.monotonic()
            on_all = failing(ReshardError, "unexpected-error", "MemoryError: no memory", on=1)
            with (
                on_all,
                fails if job.rank == 1 else nullcontext(),
                job.agreement.phase("prepare", 30),
            ):
                weights.prepare()
            assert time.monotonic() - start < 10
            with job.agreement.phase("prepare"):
                weights.prepare()
            assert differing(weights, "fp8") == []
