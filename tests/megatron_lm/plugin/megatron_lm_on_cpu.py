"""pytest plugin: Megatron-LM's unit tests on CPU and gloo.

Loaded by name in the ranks that `tests.megatron_lm.unit_tests` starts; in that process `tests` is Megatron-LM's. It
applies our groups before a test is collected, gives the test modules the `torch` that Megatron itself sees, and lets
each test run with CUDA spelled. The environment says what to do:

    MEGATRON_LM_GROUPS     groups of patches, with commas
    MEGATRON_LM_OUTCOMES   folder for outcomes, a file of JSON lines per rank
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_patches
from megatron_patches import cpu_torch

SECONDS_FOR_A_PEER = 40
_TE_SPEC = "get_gpt_layer_with_transformer_engine_spec"

GROUPS = os.environ["MEGATRON_LM_GROUPS"].split(",")
NUM_RANKS = int(os.environ["WORLD_SIZE"])
OUTCOMES = Path(os.environ["MEGATRON_LM_OUTCOMES"]) / f"rank{os.environ['RANK']}.jsonl"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the conftest, which asks for Transformer Engine and would download data sets."""
    megatron_patches.apply(GROUPS)
    if "hooks" in GROUPS:  # so that they do something
        megatron_patches.set_buffer_allocator(_allocate)
        megatron_patches.add_post_step_hook(lambda optimizer, version: megatron_patches.optimizer_tensors(optimizer))
    _download_nothing()
    _say_that_transformer_engine_is_missing()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, None, None]:
    """Some test modules import a name of Transformer Engine's at their head that only a few of their tests use."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[-1]].fp8_autocast = None
    yield
    for name in names:
        sys.modules.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    namespace = _torch_of_tests()
    helpers = [module for name, module in sys.modules.items() if name.startswith("tests.")]
    for module in {*helpers, *(item.module for item in items)}:
        _redirect(module, namespace)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Generator[None, None, None]:
    """Groups do not outlive their test: gloo's would hold threads, and what a failed test left in them."""
    with cpu_torch.CudaSpelling():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for what ends a test: its call, or a phase before or after it that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid, "outcome": report.outcome, "reason": _reason(report)}
        with OUTCOMES.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).partition("\n")[0]


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _download_nothing() -> None:
    """The conftest of Megatron-LM fetches data sets for tests that are not run here."""
    from tests.test_utils.python_scripts import download_unit_tests_dataset

    download_unit_tests_dataset.download_and_extract_asset = lambda **_unused: None


def _say_that_transformer_engine_is_missing() -> None:
    """The tests ask for its version, which raises a TypeError where there is none."""
    import megatron.core.utils

    megatron.core.utils.is_te_min_version = lambda version, check_equality=True: False


def _torch_of_tests() -> ModuleType:
    """What Megatron's modules see, with as many devices as ranks and with gloo for NCCL."""
    namespace = cpu_torch.torch_on_cpu(torch)
    vars(namespace.cuda)["device_count"] = lambda: NUM_RANKS
    vars(namespace.distributed).update(init_process_group=_init_process_group, new_group=_new_group)
    return namespace


def _init_process_group(backend: str | None = None, **kwargs: Any) -> None:
    """On keys of the store that no other test has used."""
    if "store" in kwargs:
        kwargs["store"] = dist.PrefixStore(os.environ["PYTEST_CURRENT_TEST"], kwargs["store"])
    kwargs["timeout"] = datetime.timedelta(seconds=SECONDS_FOR_A_PEER)
    dist.init_process_group("gloo", **kwargs)


def _new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Tests make groups of which only the members know, which NCCL allows and gloo by its hashed names."""
    return dist.new_group(ranks, **{**kwargs, "use_local_synchronization": True, "backend": None})


def _redirect(module: ModuleType, namespace: ModuleType) -> None:
    for attr, value in list(vars(module).items()):
        if value is torch:
            setattr(module, attr, namespace)
        elif value is dist:
            setattr(module, attr, namespace.distributed)
    if hasattr(module, _TE_SPEC):
        setattr(module, _TE_SPEC, _local_spec())


def _local_spec() -> Callable[..., Any]:
    """Transformer Engine has no CPU build; Megatron's own layers hold the same parameters."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec
