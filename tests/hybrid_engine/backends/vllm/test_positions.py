"""Tracing leaves no state, and traced and computed positions give the same order of ranks.

test_layouts.py compares traced positions with loaded models, and tests/hybrid_engine/test_assembly.py
has an engine that differs from its position.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from contextlib import closing
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
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.regions import Shape
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.families import served_config


@dataclass(frozen=True)
class Case:
    """A model in vLLM's sizes, and Megatron's sizes from which an order of ranks is chosen."""

    family: str
    train: dict[str, int]
    sizes: InferenceParallelism
    quantization: str | None = None

    @property
    def name(self) -> str:
        sizes = f"tp{self.sizes.tensor} pp{self.sizes.pipeline} ep{self.sizes.expert} of {self.sizes.world_size}"
        return f"{self.family} {sizes} {self.quantization or ''}".strip()


TENSOR_4 = {"tensor": 4}
TENSOR_2 = {"tensor": 2}
STAGES = {"tensor": 2, "pipeline": 2}
CASES = [
    Case("llama", {"pipeline": 2}, InferenceParallelism(2, tensor=2)),
    Case("llama tied", {"pipeline": 2}, InferenceParallelism(2, pipeline=2)),
    Case("qwen3_moe", TENSOR_2, InferenceParallelism(2, expert=2)),
    Case("qwen3", TENSOR_2, InferenceParallelism(2, tensor=2), quantization="fp8_per_channel"),
    Case("qwen3", TENSOR_4, InferenceParallelism(4, tensor=2)),
    Case("gemma2", STAGES, InferenceParallelism(4, tensor=2, pipeline=2)),
    Case("qwen3_moe", STAGES, InferenceParallelism(4, tensor=2, expert=4)),
]


@dataclass(frozen=True)
class Outcome:
    """Results of one rank for a case.

    Attributes:
        residue: state that tracing left behind, in words.
        orders: chosen from the traced and from the computed positions.
    """

    residue: list[str]
    orders: tuple[tuple[int, ...], tuple[int, ...]]


def run_cases(directory: str, cases: list[Case]) -> dict[str, Outcome]:
    dist.init_process_group("gloo")
    with closing(Job.join(120)) as job:
        return {case.name: _outcome_of(case, job, Path(directory, case.name.replace(" ", "-"))) for case in cases}


def _settings_of(case: Case, directory: Path) -> InferenceSettings:
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16, quantization=case.quantization)
    return InferenceSettings(support.write_config(directory, served_config(case.family)), case.sizes, generate)


def _outcome_of(case: Case, job: Job, directory: Path) -> Outcome:
    settings = _settings_of(case, directory)
    table = table_for(served_config(case.family))
    gc.collect()  # tensors of an earlier case
    before = _state()
    positions = gather_positions(settings, table, job)  # each rank traces one position
    residue = _residue_since(before)
    computed = inference_side(table, case.sizes)
    source = training_side(table, TrainParallelism(job.world_size, **case.train)).holdings
    choose = partial(rank_order, "auto", source, hosts=("host",) * job.world_size, tensor=case.sizes.tensor)
    orders = choose(positions=positions.placed.holdings), choose(positions=computed.holdings)
    return Outcome(residue, orders)


def _state() -> Values:
    """Return the state of the process and the state that vLLM keeps in its modules."""
    parallel_state = internals.PARALLEL_STATE.load()
    kind = parallel_state.GroupCoordinator
    from vllm.config import get_current_vllm_config_or_none
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # plug-ins register once per process and stay
    return {
        "vLLM's groups": [name for name, value in vars(parallel_state).items() if isinstance(value, kind)],
        "vLLM's count of hosts": parallel_state._NODE_COUNT,
        "vLLM's names of groups": dict(parallel_state._groups),
        "vLLM's configuration": get_current_vllm_config_or_none(),
        "vLLM's missing layers": dict(internals.MISSING_LAYERS.load()),
        "vLLM's rotary embeddings": dict(internals.ROPES.load()),
        "vLLM's loaders": dict(internals.LOADERS.load()),
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


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Outcomes by name of the case and by rank."""
    directory = str(tmp_path_factory.mktemp("positions"))
    results: dict[str, list[Outcome]] = {}
    for num_ranks in (2, 4):
        cases = [case for case in CASES if case.sizes.world_size == num_ranks]
        by_rank = engines.launch(run_cases, num_ranks, directory, cases)
        results |= {case.name: [outcomes[case.name] for outcomes in by_rank] for case in cases}
    return results


@pytest.fixture(params=[case.name for case in CASES])
def by_rank(outcomes: dict[str, list[Outcome]], request: pytest.FixtureRequest) -> list[Outcome]:
    return outcomes[request.param]


def test_tracing_leaves_no_state(by_rank: list[Outcome]) -> None:
    assert [outcome.residue for outcome in by_rank] == [[]] * len(by_rank)


def test_plans_and_jobs_choose_the_same_order(by_rank: list[Outcome]) -> None:
    # `plan` uses computed positions, jobs use traced ones.
    assert len({order for outcome in by_rank for order in outcome.orders}) == 1


def test_some_chosen_order_is_not_sequential(outcomes: dict[str, list[Outcome]]) -> None:
    assert any(outcome.orders[0] != tuple(range(len(by_rank))) for by_rank in outcomes.values() for outcome in by_rank)


def refuse(directory: str) -> tuple[str, list[str], list[str]]:
    """Trace with a wrong shape, then communicate; return the error, the residue and all errors."""
    dist.init_process_group("gloo")
    case = CASES[0]
    settings = _settings_of(case, Path(directory))
    shapes = {**table_for(served_config(case.family)).shapes, "model.norm.weight": (7,)}
    with closing(Job.join(120)) as job:
        before = _state()
        with pytest.raises(ModelError) as caught:
            layout_of_position(settings, job, shapes)
        message = str(caught.value)
        del caught  # its frames refer to the model
        gc.collect()
        residue = _residue_since(before)
    seat = _seat_class(0)([[0, 1]])
    tries = [
        lambda: dist.all_reduce(torch.ones(1), group=seat.cpu_group),
        lambda: seat.device_group.allreduce([torch.ones(1)]),
        lambda: seat.all_reduce(torch.ones(1)),
        lambda: seat.broadcast_object(1),
        seat.barrier,
    ]
    return message, residue, [_error_of(communicate) for communicate in tries]


def _error_of(communicate: Callable[[], object]) -> str:
    try:
        communicate()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__
    return ""


def test_a_wrong_shape_is_refused_without_residue_and_traced_groups_cannot_communicate(
    engines: Ranks, tmp_path: Path
) -> None:
    for error, residue, errors in engines.launch(refuse, 2, str(tmp_path)):
        assert "model.norm.weight (7,)" in error
        assert not residue
        assert all(errors), errors


def trace_without_job(directory: str) -> Values:
    """Return the refusals of positions without a job, and the layout that is traced after them."""
    position = Position(1, 2, 1)
    place = Path(directory, os.environ["RANK"])
    settings = _settings_of(CASES[0], place)
    shapes = table_for(served_config("llama")).shapes
    results: Values = {}

    def refusal_of(kind: type[Exception], **changes: Any) -> str:
        arguments = {"position": position, "settings": settings, "tensors": shapes, **changes}
        with pytest.raises(kind) as caught:
            planned_position(**arguments)
        return str(caught.value)

    results["wrong shape"] = refusal_of(ModelError, tensors={**shapes, "model.norm.weight": (7,)})
    beyond_positions = replace(settings, generate=settings.generate.model_copy(update={"max_model_len": 4096}))
    results["refused by vLLM"] = refusal_of(ConfigError, settings=beyond_positions)
    with mock.patch.object(positions, "_model", side_effect=AssertionError("no experts")):
        results["a condition of the model"] = refusal_of(ModelError)
    # No refusal left its group.
    results["group"] = dist.is_initialized()
    results["layout"] = planned_position(position, settings, shapes).layout
    dist.init_process_group("gloo")
    results["a rank of a job"] = refusal_of(StateError)
    results["job"] = layout_of_position_of_job(settings, shapes)
    return results


def layout_of_position_of_job(settings: InferenceSettings, shapes: dict[str, Shape]) -> Any:
    with closing(Job.join(120)) as job:
        return layout_of_position(settings, job, shapes)


def test_a_position_without_a_job_is_that_of_a_job_and_is_refused_with_reasons(engines: Ranks, tmp_path: Path) -> None:
    results = engines.launch(trace_without_job, 2, str(tmp_path))
    for result in results:
        assert "model.norm.weight (7,)" in result["wrong shape"]
        assert "max_model_len (4096)" in result["refused by vLLM"]
        assert "is a rank of a job" in result["a rank of a job"]
        assert "no experts. vLLM's class of the model requires that" in result["a condition of the model"]
        assert not result["group"]
    assert results[0]["layout"] == results[1]["layout"] == results[1]["job"]
    assert results[0]["job"] != results[1]["job"]
