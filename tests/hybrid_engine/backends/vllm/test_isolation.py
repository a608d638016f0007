"""vLLM in the user's process.

Covers the job's ranks, groups and device, process settings, and references that are released at the
end. Kernels are recorded, not run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.isolation import (
    building_groups,
    check_world,
    forget_import_frames,
    group_in_listed_order,
    register_graph_buffers,
)
from hybrid_engine.backends.vllm.process_state import ProcessSettings, process_settings_kept
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from tests.harness.errors import has_violations
from tests.harness.launch import on_engines

ORDER = [0, 2, 1, 3]


def check(
    sizes: InferenceParallelism, world_size: int, rank: int = 0, *, is_default: bool = True
) -> None:
    world = World(dist.HashStore(), rank, world_size, is_default=is_default)
    devices = tuple(map(str, range(world_size)))
    job = Job(world, ("host",) * world_size, devices, torch.device("cpu"), 1.0, None, ExitStack())
    check_world(InferenceSettings("model", sizes), job)


def test_a_job_of_the_right_size_and_rank_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    check(InferenceParallelism(4, tensor=2), 4)
    monkeypatch.setenv("RANK", "3")
    check(InferenceParallelism(4, tensor=2), 4, rank=3)


def test_wrong_numbers_of_ranks_and_wrong_ranks_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    expected = has_violations(
        (
            "infer_tensor_parallel_size x infer_pipeline_parallel_size x replicas",
            "wrong-world-size",
        ),
        ("RANK", "wrong-rank"),
        ("Job.join(world=...)", "not-the-default-group"),
    )
    with pytest.raises(ConfigError, match=r"2 x 3 x 2 = 12.*4", check=expected):
        check(InferenceParallelism(12, tensor=2, pipeline=3), 4, rank=1, is_default=False)


IMPORTING = """
try:
    raise ModuleNotFoundError("no torchcodec")
except ModuleNotFoundError as error:
    kept = error
"""


def imported(name: str) -> tuple[dict[str, Any], weakref.ref[torch.nn.Module]]:
    """Run a module that keeps an error, imported by a caller with a local `trainer`."""
    trainer = torch.nn.Linear(1, 1)  # kept alive by the error's traceback
    module: dict[str, Any] = {"__name__": name}
    exec(IMPORTING, module)
    return module, weakref.ref(trainer)


@pytest.mark.parametrize("name", ["vllm.multimodal", "vllm_of_somebody"])
def test_import_errors_kept_by_vllm_release_the_importing_frames(name: str) -> None:
    module, trainer = imported(name)
    assert trainer() is not None
    forget_import_frames()
    is_vllm = name.startswith("vllm.")
    assert (trainer() is None) == (module["kept"].__traceback__ is None) == is_vllm, (
        "only modules of vLLM may change"
    )


# -- groups ----------------------------------------------------------------------------------------


@on_engines(4)
def test_addresses_are_registered_in_the_order_of_the_group() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(ORDER, backend="gloo", sort_ranks=False)  # group order is not rank order
    rank = dist.get_rank()
    ops = internals.CUSTOM_OPS
    ops.get_graph_buffer_ipc_meta = lambda pointer: ([10 * rank], [10 * rank + 1, rank])
    with (
        mock.patch.object(ops, "register_graph_buffers") as registered,
        internals.REGISTER_GRAPH_BUFFERS.replaced(lambda original: register_graph_buffers),
    ):
        register = internals.REGISTER_GRAPH_BUFFERS.load()
        register(SimpleNamespace(group=group, rank=dist.get_rank(group), _ptr=0))
    # Handles and offsets that the kernel gets.
    registered.assert_called_once_with(
        0, [[10 * rank] for rank in ORDER], [[10 * rank + 1, rank] for rank in ORDER]
    )
    dist.destroy_process_group()


def test_a_torch_without_sort_ranks_gets_no_such_argument() -> None:
    def sorting(ranks: list[int] | None = None) -> list[int]:  # torch 2.11
        return sorted(ranks or ())

    def listed(ranks: list[int] | None = None, *, sort_ranks: bool = True) -> list[int]:
        return sorted(ranks or ()) if sort_ranks else list(ranks or ())

    assert group_in_listed_order(sorting)(ORDER) == sorted(ORDER)
    assert group_in_listed_order(listed)(ORDER) == ORDER


def test_other_rank_orders_need_a_torch_with_sort_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = InferenceParallelism(4, tensor=2, rank_order=tuple(ORDER))
    check(sizes, 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks=None: None)
    with pytest.raises(
        ConfigError, check=has_violations(("infer_rank_order", "torch-sorts-ranks"), exactly=False)
    ):
        check(sizes, 4)
    check(InferenceParallelism(4, tensor=2), 4)


@on_engines(1)
def test_vllm_uses_the_device_of_the_job() -> None:
    job = Job.join(60, device=torch.device("cuda", 5))
    with building_groups(InferenceSettings("model"), job):
        assert os.environ["LOCAL_RANK"] == "5"
    job.close()
    assert os.environ["LOCAL_RANK"] == "0"


# -- process settings ------------------------------------------------------------------------------


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OF_TRAINING", "0")
    monkeypatch.setenv("OF_BOTH", "0")
    settings = ProcessSettings.now()
    yield
    settings.enter()


def change() -> ProcessSettings:
    """Change process settings like vLLM."""
    torch.set_float32_matmul_precision(
        "high" if torch.get_float32_matmul_precision() == "highest" else "highest"
    )
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_cudnn_sdp(not torch.backends.cuda.cudnn_sdp_enabled())
    os.environ.pop("OF_TRAINING", None)
    os.environ["OF_VLLM"] = os.environ["OF_BOTH"] = "1"
    return ProcessSettings.now()


@pytest.mark.usefixtures("restored")
def test_process_settings_are_restored() -> None:
    before = ProcessSettings.now()
    with process_settings_kept():
        changed = change()
        assert changed == ProcessSettings.now() != before
    assert ProcessSettings.now() == before
    with pytest.raises(KeyboardInterrupt), process_settings_kept(changed):
        assert ProcessSettings.now() == changed
        raise KeyboardInterrupt
    assert ProcessSettings.now() == before


def test_the_current_stream_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    class Stream(str):  # records waits instead of waiting
        def wait_stream(self, other: str) -> None:
            waits.append((self, other))

    training_stream = Stream("training's")
    vllm_stream = Stream("vLLM's")
    current = [training_stream]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with process_settings_kept(replace(ProcessSettings.now(), stream=vllm_stream)):
        assert current == [vllm_stream]
        assert waits == [(vllm_stream, training_stream)]
    assert current == [training_stream]
    assert waits == [(vllm_stream, training_stream), (training_stream, vllm_stream)]
