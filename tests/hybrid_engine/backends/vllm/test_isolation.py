"""What is checked before vLLM is imported, the size of the job and its ranks, and what is let go after its end."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.process.isolation import check_world, forget_import_frames
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job


def check(sizes: InferenceParallelism, world_size: int, rank: int = 0) -> None:
    job = Job(rank, ("host",) * world_size, torch.device("cpu"), 1.0, None, ExitStack())
    check_world(InferenceSettings("model", sizes), job)


def test_a_job_of_that_size_whose_rank_nobody_denies_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    check(InferenceParallelism(4, tensor=2), 4)
    monkeypatch.setenv("RANK", "3")
    check(InferenceParallelism(4, tensor=2), 4, rank=3)


def test_another_number_of_ranks_is_refused_with_all_numbers_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError) as caught:
        check(InferenceParallelism(12, tensor=2, pipeline=3), 4)
    (violation,) = caught.value.findings
    assert violation.key == "infer_tensor_parallel_size x infer_pipeline_parallel_size x replicas"
    assert violation.problem == "2 x 3 x 2 = 12, but the job has 4 ranks"


def test_another_rank_in_the_environment_is_refused_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    with pytest.raises(ConfigError) as caught:
        check(InferenceParallelism(8), 4, rank=1)
    size, rank = caught.value.findings
    assert "1 x 1 x 8 = 8" in size.problem
    assert str(rank) == "RANK: 7, but this is rank 1 of 4 in the process group. Launch with torchrun, or set it to 1"


IMPORTING = """
try:
    raise ModuleNotFoundError("no torchcodec")
except ModuleNotFoundError as error:
    kept = error
"""


def imported(name: str) -> tuple[dict[str, Any], weakref.ref[torch.nn.Module]]:
    """A module that keeps an error, imported by a caller with a trainer among its variables."""
    trainer = torch.nn.Linear(1, 1)
    module: dict[str, Any] = {"__name__": name}
    exec(IMPORTING, module)
    return module, weakref.ref(trainer)


@pytest.mark.parametrize("name", ["vllm.multimodal", "vllm_of_somebody"])
def test_errors_that_vllm_keeps_of_its_imports_let_go_of_whoever_imported_it(name: str) -> None:
    module, trainer = imported(name)
    assert trainer() is not None
    forget_import_frames()
    is_vllm = name.startswith("vllm.")
    assert (trainer() is None) == (module["kept"].__traceback__ is None) == is_vllm, "others are left alone"
