"""pytest plugin: Megatron-LM's unit tests on CPU and gloo.

Ranks started by test_unit_tests.py load it by name; in these processes `tests` is Megatron-LM's
package. It applies our groups of patches before collection, gives test modules the patched `torch`
that Megatron sees, and replaces CUDA devices by the CPU while a test runs. Environment variables:

    MEGATRON_LM_GROUPS     groups of patches, separated by commas
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
NUM_RANKS = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])
OUTCOMES = Path(os.environ["MEGATRON_LM_OUTCOMES"]) / f"rank{RANK}.jsonl"

_NUM_GROUPS: Counter[tuple[int, ...]] = Counter()
"""Number of process groups made since torch.distributed was initialized, by their ranks."""


class CudaIsCpu(cuda_names.CudaSpelling):
    """Mode in which calls of torch that name a CUDA device use the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {name: _device(value) for name, value in (kwargs or {}).items()}
        return super().__torch_function__(func, types, tuple(map(_device, args)), named)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Patch before the conftest, which requires Transformer Engine and would download data sets."""
    megatron_patches.apply(GROUPS)
    if "hooks" in GROUPS:  # Otherwise the hook on buffers would have no effect.
        megatron_patches.set_buffer_allocator(_allocate)
    _skip_downloads()
    _report_missing_transformer_engine()
    _replace_adam()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, None, None]:
    """Provide Transformer Engine's modules, which some test modules import but hardly use."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[-1]].fp8_autocast = None
    yield
    for name in names:
        sys.modules.pop(name, None)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write the outcome of a file that could not be imported or was skipped."""
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
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Seed the test, and destroy process groups at the end of a test or class.

    Groups of gloo would keep threads and leftovers of failed tests. Each rank has a fixed seed.
    """
    torch.manual_seed(RANK)
    with CudaIsCpu():
        yield
    if (
        nextitem is None
        or nextitem.parent is not item.parent
        or not isinstance(item.parent, pytest.Class)
    ):
        _destroy_groups()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test's call, and of any other phase that did not pass."""
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
    """AdamW like NVIDIA's: no initial learning rate, and a step count from the start."""

    def __init__(self, params: Any, lr: float | None = None, **kwargs: Any) -> None:
        super().__init__(params, 1e-3 if lr is None else lr, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        for state in self.state.values():
            state.setdefault("step", torch.zeros(()))
        return super().state_dict()


def _device(value: Any) -> Any:
    return (
        cuda_names.CPU
        if isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        else value
    )


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _skip_downloads() -> None:
    """Skip the downloads of data sets in Megatron-LM's conftest; tests here need none."""
    from tests.test_utils.python_scripts import download_unit_tests_dataset

    download_unit_tests_dataset.download_and_extract_asset = lambda **_unused: None


def _destroy_groups() -> None:
    """Destroy all process groups, and state of Megatron and its tests that refers to them."""
    from megatron.core import parallel_state
    from megatron.core.resharding import refit

    from tests.unit_tests.test_utilities import Utils

    refit.clear_service_cache()
    parallel_state.destroy_model_parallel()
    Utils.inited = False
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_missing_transformer_engine() -> None:
    """Without Transformer Engine, Megatron's check of its version would raise a TypeError."""
    import megatron.core.utils

    megatron.core.utils.is_te_min_version = lambda version, check_equality=True: False


def _replace_adam() -> None:
    import megatron.core.optimizer

    namespace = megatron.core.optimizer.torch  # The namespace that group "cpu" has installed.
    vars(namespace)["optim"] = cuda_names.Namespace(torch.optim, {"AdamW": AdamW})


def _torch_of_tests() -> ModuleType:
    """Return the `torch` that Megatron sees, with a device per rank and gloo for NCCL."""
    namespace = cuda_names.torch_on_cpu(torch)
    vars(namespace.cuda)["device_count"] = lambda: NUM_RANKS
    vars(namespace.distributed).update(
        init_process_group=_init_process_group,
        new_group=_new_group,
        init_device_mesh=_init_device_mesh,
    )
    distributed_c10d._hash_ranks_to_str = _name_group
    return namespace


def _init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    # The prefix separates the keys of different tests.
    if "store" in kwargs:
        kwargs["store"] = dist.PrefixStore(os.environ["PYTEST_CURRENT_TEST"], kwargs["store"])
    kwargs["timeout"] = datetime.timedelta(seconds=SECONDS_FOR_A_PEER)
    _NUM_GROUPS.clear()
    dist.init_process_group("gloo", **kwargs)


def _new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    # In tests only the members create a group. gloo allows that if all agree on the name.
    return dist.new_group(ranks, **{**kwargs, "use_local_synchronization": True, "backend": None})


def _init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return init_device_mesh("cpu", *args, **kwargs)


def _name_group(ranks: Sequence[int]) -> str:
    """Return a name common to all members; torch's depends on the rank's number of groups."""
    _NUM_GROUPS[tuple(ranks)] += 1
    return f"{list(ranks)}, the {_NUM_GROUPS[tuple(ranks)]}. of these"


def _redirect(module: ModuleType, namespace: ModuleType) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    submodules = getattr(
        gpt_layer_specs, "get_gpt_layer_with_transformer_engine_submodules", None
    )  # Since 0.17.
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
    """Return Megatron's own layers, whose parameters have the sizes of Transformer Engine's and
    grouped GEMM.

    Their random numbers come from a generator per mode of parallelism, which some tests do not
    seed.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    if not get_cuda_rng_tracker().is_initialized():
        model_parallel_cuda_manual_seed(0)
    return get_gpt_layer_local_spec(*args, **{**kwargs, "moe_grouped_gemm": False})
