"""Tracing leaves no state.

test_layouts.py compares traced positions with computed ones and with loaded models, and
tests/hybrid_engine/test_assembly.py
has an engine that differs from its position.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.assembly import gather_positions
from hybrid_engine.backends.vllm import (
    InferenceSettings,
    Position,
    internals,
    layout_of_position,
    planned_position,
    positions,
)
from hybrid_engine.backends.vllm.positions import _seat_class
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, ModelError, StateError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.zoo.families import served_config


@dataclass(frozen=True)
class Case:
    """A model in vLLM's sizes."""

    family: str
    sizes: InferenceParallelism
    quantization: str | None = None

    def __str__(self) -> str:
        sizes = f"tp{self.sizes.tensor} pp{self.sizes.pipeline} ep{self.sizes.expert}"
        return f"{self.family} {sizes} {self.quantization or ''}".strip()


TWO_RANKS = [
    Case("llama", InferenceParallelism(2, tensor=2)),
    Case("llama tied", InferenceParallelism(2, pipeline=2)),
    Case("qwen3_moe", InferenceParallelism(2, expert=2)),
    Case("qwen3", InferenceParallelism(2, tensor=2), quantization="fp8_per_channel"),
]


@on_engines({2: TWO_RANKS, 4: [Case("qwen3_moe", InferenceParallelism(4, tensor=2, expert=4))]})
def test_tracing_leaves_no_state(tmp_path: Path, case: Case) -> None:
    job()  # before the state is read
    settings = _settings_of(case, tmp_path)
    table = table_for(served_config(case.family))
    gc.collect()  # tensors of an earlier case
    before = _state()
    gather_positions(settings, table, job())  # each rank traces one position
    assert _residue_since(before) == []


def _settings_of(case: Case, directory: Path) -> InferenceSettings:
    generate = GenerateConfig(
        max_model_len=64, max_num_seqs=8, kv_cache_mb=16, quantization=case.quantization
    )
    return InferenceSettings(
        support.write_config(directory, served_config(case.family)), case.sizes, generate
    )


def _state() -> Values:
    """Return the state of the process and the state that vLLM keeps in its modules."""
    parallel_state = internals.PARALLEL_STATE
    kind = parallel_state.GroupCoordinator
    from vllm.config import get_current_vllm_config_or_none
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # plug-ins register once per process and stay
    return {
        "vLLM's groups": [
            name for name, value in vars(parallel_state).items() if isinstance(value, kind)
        ],
        "vLLM's count of hosts": parallel_state._NODE_COUNT,
        "vLLM's names of groups": dict(parallel_state._groups),
        "vLLM's configuration": get_current_vllm_config_or_none(),
        "vLLM's missing layers": dict(internals.MISSING_LAYERS),
        "vLLM's rotary embeddings": dict(internals.ROPES),
        "vLLM's loaders": dict(internals.LOADERS),
        "torch's groups": len(dist.distributed_c10d._world.pg_map),
        "the environment": dict(os.environ),
        "random numbers": (random.getstate(), torch.get_rng_state()),
        "the default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "tensors without memory": _meta_tensors(),
    }


def _residue_since(before: Values) -> list[str]:
    return sorted(name for name, value in _state().items() if not _is_same(value, before[name]))


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple):
        return all(_is_same(*pair) for pair in zip(left, right, strict=True))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def _meta_tensors() -> int:
    return sum(isinstance(item, torch.Tensor) and item.is_meta for item in gc.get_objects())


@on_engines(2)
def test_a_wrong_shape_is_refused_without_residue_and_traced_groups_cannot_communicate(
    tmp_path: Path,
) -> None:
    case = TWO_RANKS[0]
    shapes = {**table_for(served_config(case.family)).shapes, "model.norm.weight": (7,)}
    job()
    settings = _settings_of(case, tmp_path)
    before = _state()
    with pytest.raises(ModelError) as caught:
        layout_of_position(settings, job(), shapes)
    assert "model.norm.weight (7,)" in str(caught.value)
    del caught  # its frames refer to the model
    gc.collect()
    assert not _residue_since(before)
    seat = _seat_class(0)([[0, 1]])
    for communicate in (
        lambda: dist.all_reduce(torch.ones(1), group=seat.cpu_group),
        lambda: seat.device_group.allreduce([torch.ones(1)]),
        lambda: seat.all_reduce(torch.ones(1)),
        lambda: seat.broadcast_object(1),
        seat.barrier,
    ):
        with pytest.raises((ValueError, RuntimeError)):
            communicate()


@on_engines(2, timeout=200)  # other than above: a launch of its own, without a job
def test_a_position_without_a_job_is_that_of_a_job_and_is_refused_with_reasons(
    tmp_path: Path,
) -> None:
    settings = _settings_of(TWO_RANKS[0], tmp_path / os.environ["RANK"])
    shapes = table_for(served_config("llama")).shapes
    trace = partial(planned_position, Position(1, 2, 1))
    with pytest.raises(ModelError, match=r"model\.norm\.weight \(7,\)"):
        trace(settings, {**shapes, "model.norm.weight": (7,)})
    beyond_positions = replace(
        settings, generate=settings.generate.model_copy(update={"max_model_len": 4096})
    )
    with pytest.raises(ConfigError, match=r"max_model_len \(4096\)"):
        trace(beyond_positions, shapes)
    refusal = pytest.raises(
        ModelError, match=r"no experts\. vLLM's class of the model requires that"
    )
    with mock.patch.object(positions, "_model", side_effect=AssertionError("no experts")), refusal:
        trace(settings, shapes)
    assert not dist.is_initialized()  # no refusal left its group
    layout = trace(settings, shapes).layout
    job()
    with pytest.raises(StateError, match="is a rank of a job"):
        trace(settings, shapes)
    first, second = of_all_ranks(layout_of_position(settings, job(), shapes))
    assert layout == second != first
