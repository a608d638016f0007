"""pytest plugin: Megatron-LM's unit tests on CPU and gloo.

Loaded by name in the ranks that test_unit_tests.py starts; in that process `tests` is Megatron-LM's. It
applies our groups before a test is collected, gives the test modules the `torch` that Megatron itself sees, and reads
CUDA as CPU while a test runs. The environment says what to do:

    MEGATRON_LM_GROUPS     groups of patches, with commas
    MEGATRON_LM_OUTCOMES   folder for outcomes, a file of JSON lines per rank
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron_patches
from megatron_patches.cpu import cuda_names

SECONDS_FOR_A_PEER = 40

GROUPS = os.environ["MEGATRON_LM_GROUPS"].split(",")
NUM_RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
OUTCOMES = Path(os.environ["MEGATRON_LM_OUTCOMES"]) / f"rank{RANK}.jsonl"

_NUM_MADE_OF: Counter[tuple[int, ...]] = Counter()
"""Ranks -> process groups made of them since torch.distributed was initialized."""


class CudaIsCpu(cuda_names.CudaSpelling):
    """While active, each call of torch that names a CUDA device means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: _device(value) for name, value in (kwargs or {}).items()}
        return super().__torch_function__(func, types, tuple(map(_device, args)), named)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the conftest, which asks for Transformer Engine and would download data sets."""
    megatron_patches.apply(GROUPS)
    if "hooks" in GROUPS:  # so that the one on buffers does something
        megatron_patches.set_buffer_allocator(_allocate)
    _download_nothing()
    _say_that_transformer_engine_is_missing()
    _replace_adam()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, None, None]:
    """Some test modules import a name of Transformer Engine's at their head that only a few of their tests use."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[-1]].fp8_autocast = None
    yield
    for name in names:
        sys.modules.pop(name, None)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A line for a file that could not be read or skips itself."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, _reason(report))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    namespace = _torch_of_tests()
    helpers = [module for name, module in sys.modules.items() if name.startswith("tests.")]
    for module in {*helpers, *(item.module for item in items)}:
        _redirect(module, namespace)
    for item in items:
        _write(item.nodeid, "unfinished", "")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Groups do not outlive their test or class: gloo's would hold threads, and what a failed test left in them.

    A test that seeds nothing has a rank's own random numbers, whatever ran before it.
    """
    torch.manual_seed(RANK)
    with CudaIsCpu():
        yield
    if nextitem is None or nextitem.parent is not item.parent or not isinstance(item.parent, pytest.Class):
        _destroy_groups()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for what ends a test: its call, or a phase before or after it that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, _reason(report))


def _write(test: str, outcome: str, reason: str) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).partition("\n")[0]


class AdamW(torch.optim.AdamW):
    """As NVIDIA's: with no learning rate until the scheduler sets one, and with a count of steps before the first."""

    def __init__(self, params: Any, lr: float | None = None, **kwargs: Any) -> None:
        super().__init__(params, 1e-3 if lr is None else lr, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        for state in self.state.values():
            state.setdefault("step", torch.zeros(()))
        return super().state_dict()


def _device(value: Any) -> Any:
    return cuda_names.CPU if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _download_nothing() -> None:
    """The conftest of Megatron-LM fetches data sets for tests that are not run here."""
    from tests.test_utils.python_scripts import download_unit_tests_dataset

    download_unit_tests_dataset.download_and_extract_asset = lambda **_unused: None


def _destroy_groups() -> None:
    """With all that Megatron and its tests keep of them."""
    from megatron.core import parallel_state
    from megatron.core.resharding import refit

    from tests.unit_tests.test_utilities import Utils

    refit.clear_service_cache()
    parallel_state.destroy_model_parallel()
    Utils.inited = False
    if dist.is_initialized():
        dist.destroy_process_group()


def _say_that_transformer_engine_is_missing() -> None:
    """The tests ask for its version, which raises a TypeError where there is none."""
    import megatron.core.utils

    megatron.core.utils.is_te_min_version = lambda version, check_equality=True: False


def _replace_adam() -> None:
    import megatron.core.optimizer

    namespace = megatron.core.optimizer.torch  # that of group "cpu", which is applied
    vars(namespace)["optim"] = cuda_names.Namespace(torch.optim, {"AdamW": AdamW})


def _torch_of_tests() -> ModuleType:
    """What Megatron's modules see, with as many devices as ranks and with gloo for NCCL."""
    namespace = cuda_names.torch_on_cpu(torch)
    vars(namespace.cuda)["device_count"] = lambda: NUM_RANKS
    vars(namespace.distributed).update(
        init_process_group=_init_process_group, new_group=_new_group, init_device_mesh=_init_device_mesh
    )
    distributed_c10d._hash_ranks_to_str = _name_group
    return namespace


def _init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """On keys of the store that no other test has used."""
    if "store" in kwargs:
        kwargs["store"] = dist.PrefixStore(os.environ["PYTEST_CURRENT_TEST"], kwargs["store"])
    kwargs["timeout"] = datetime.timedelta(seconds=SECONDS_FOR_A_PEER)
    _NUM_MADE_OF.clear()
    dist.init_process_group("gloo", **kwargs)


def _new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Tests make groups of which only the members know; NCCL allows that, gloo if all agree on the name."""
    return dist.new_group(ranks, **{**kwargs, "use_local_synchronization": True, "backend": None})


def _init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return init_device_mesh("cpu", *args, **kwargs)


def _name_group(ranks: Sequence[int]) -> str:
    """A name on which the members agree. torch counts all groups of a rank, of which each may have others."""
    _NUM_MADE_OF[tuple(ranks)] += 1
    return f"{list(ranks)}, the {_NUM_MADE_OF[tuple(ranks)]}. of these"


def _redirect(module: ModuleType, namespace: ModuleType) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    submodules = getattr(gpt_layer_specs, "get_gpt_layer_with_transformer_engine_submodules", None)  # since 0.17
    for attr, value in list(vars(module).items()):
        if value is torch:
            setattr(module, attr, namespace)
        elif value is dist:
            setattr(module, attr, namespace.distributed)
        elif value is gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec:
            setattr(module, attr, _local_spec)
        elif value is not None and value is submodules:
            setattr(module, attr, lambda *args, **kwargs: _local_spec(*args, **kwargs).submodules)


def _local_spec(*args: Any, **kwargs: Any) -> Any:
    """Transformer Engine and grouped GEMM have no CPU build; Megatron's own layers hold parameters of the same sizes.

    They take random numbers from a generator per mode of parallelism, which not every test seeds.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    if not get_cuda_rng_tracker().is_initialized():
        model_parallel_cuda_manual_seed(0)
    return get_gpt_layer_local_spec(*args, **{**kwargs, "moe_grouped_gemm": False})
