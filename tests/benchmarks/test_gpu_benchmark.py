"""The GPU benchmark runs on the CPU with a tiny model, and its reshard is correct."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.flat_models import TINY, RankJob, rank_job
from benchmarks.timings import raise_unless_written
from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent, Place
from hybrid_engine.transports.copies import copy_straight
from hybrid_engine.transports.pull import source_extents

HEAD_DIM = TINY.hidden_size // TINY.num_heads


def numbered(job: RankJob) -> torch.Tensor:
    return torch.arange(job.source.numel, dtype=torch.float64) + 1e6 * job.rank


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reshard_splits_interleaved_projections(num_ranks: int):
    """Megatron's rows per query group are queries, key and value, consecutive in the source."""
    jobs = [rank_job(TINY, num_ranks, rank, 2**14) for rank in range(num_ranks)]
    sources = [numbered(job) for job in jobs]
    for job in jobs:
        destinations = {
            name: torch.full((buffer.numel,), torch.nan).double() for name, buffer in job.destinations.items()
        }
        for bucket in job.buckets:
            copy_straight(
                "test", bucket.index, bucket.transfers, lambda transfer: sources[transfer.src_rank], destinations
            )
        raise_unless_written(destinations)
        assert job.read_nbytes(range(num_ranks)) == job.destination_nbytes
        for layer in range(TINY.num_layers):
            q, k, v, gate, up = (
                destinations[f"model.layers.{layer}.{name}.weight"]
                for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
            )
            groups = torch.cat([part.view(TINY.num_kv_heads, -1) for part in (q, k, v)], dim=1)
            assert groups.shape[1] == (TINY.num_heads // TINY.num_kv_heads + 2) * HEAD_DIM * TINY.hidden_size
            fused = torch.cat([part.view(num_ranks, -1) for part in (gate, up)], dim=1)
            for whole in (groups.reshape(num_ranks, -1), fused):
                assert bool((whole.diff(dim=1) == 1).all())
                assert (whole[:, 0] // 1e6).tolist() == list(range(num_ranks))


def test_extents_cover_the_elements_that_are_read():
    place = Place(BufferId(0, "flat"), 10, (100, 3))
    box = Transfer("t", (2, 4), place, place, 0, Link.HOST)
    element = Transfer("t", (), Place(BufferId(0, "flat"), 7, ()), place, 0, Link.HOST)
    assert source_extents(box, 90) == [Extent(10, 20), Extent(110, 120)]
    assert source_extents(box, 91) == [Extent(10, 120)]
    assert source_extents(element, 0) == [Extent(7, 8)]


def test_the_script_keeps_other_figures_if_pulls_are_forbidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def forbidden(task: object) -> None:
        raise TransportError("not permitted")

    monkeypatch.setattr(gpu, "pull_figures", forbidden)
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--repeat", "1", "--json", str(path)])
    gpu.main()
    figures = json.loads(path.read_text())
    assert "mean nothing" in figures["device"]
    assert figures["missing"] == {"pull": "not permitted"}
    timings = {timing["name"]: timing for timing in figures["timings"]}
    assert list(timings) == ["offload", "offload, the first", "onload", "onload, the first", "reshard"]
    job = rank_job(TINY, 1, 0, 2**15)
    assert timings["reshard"]["nbytes"] == job.source_nbytes
    assert timings["offload"]["nbytes"] == 14 * job.source.numel
    for timing in timings.values():
        assert timing["of_floor"] == pytest.approx(timing["floor_seconds"] / timing["seconds"])
        assert timing["seconds"] > 0
    memory = {entry["name"]: entry["ratio"] for entry in figures["memory"]}
    assert memory["left after an offload, as the driver counts"] == 0
    assert memory["training, most at once"] >= 1
