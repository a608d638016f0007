"""apply() and revert() of the real catalogue: what changes, and that all of it comes back."""

from __future__ import annotations

import importlib
import subprocess
import sys

import megatron.core
import pytest
import torch

import megatron_patches
from megatron_patches import errors
from megatron_patches.applying import patches_of
from megatron_patches.patch import CORE_VERSIONS, Patch, release_of
from tests.harness.launch import REPO_ROOT
from tests.megatron_patches import snapshot

ALL_GROUPS = ("hooks", "cpu")
"""All that need no source tree."""


@pytest.fixture(autouse=True)
def _targets_loaded() -> None:
    load_targets()


def load_targets() -> None:
    """Import what apply() would import, so that pictures from before and after show the same modules."""
    for patch in needed_patches():
        importlib.import_module(patch.module_name)


def needed_patches() -> list[Patch]:
    """Those that apply() puts on this megatron-core."""
    return [patch for patch in patches_of(ALL_GROUPS) if patch.is_needed_by(megatron.core.__version__)]


def first_cycle() -> None:
    """The first apply() and revert() of a process leave megatron and torch as they were."""
    load_targets()
    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")  # called torch, and is not torch
    megatron, torch_itself = snapshot.of_megatron(), snapshot.of_torch()
    megatron_patches.apply(ALL_GROUPS)
    assert len(snapshot.differences(megatron, snapshot.of_megatron())) > len(needed_patches())
    megatron_patches.revert()
    assert snapshot.differences(megatron, snapshot.of_megatron()) == set()
    assert snapshot.differences(torch_itself, snapshot.of_torch()) == set()


@pytest.mark.slow  # imports Megatron
def test_the_first_revert_gives_back_every_attribute() -> None:
    """In a process of its own: here, earlier cycles could have left behind what both pictures then show.

    It imports all of Megatron, which takes minutes on a busy machine; pytest's limit for a test is the only one.
    """
    code = f"from {__name__} import first_cycle; first_cycle()"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_torch_stays_itself_while_patches_are_applied() -> None:
    before = snapshot.of_torch()
    megatron_patches.apply(ALL_GROUPS)
    assert snapshot.differences(before, snapshot.of_torch()) == set()
    assert torch.overrides._get_current_function_mode_stack() == []
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda" if not torch.cuda.is_available() else "cuda:999")


def test_only_megatron_sees_the_redirected_torch() -> None:
    from megatron.core.transformer import utils

    megatron_patches.apply(("cpu",))
    assert utils.torch is not torch
    assert utils.torch.cuda.current_device() == torch.device("cpu")
    assert utils.torch.zeros(2, device="cuda").device.type == "cpu"
    assert utils.torch.zeros(2, device="meta").device.type == "meta"
    assert utils.torch.Tensor is torch.Tensor
    assert utils.torch.device("cuda", 0) == torch.device("cpu")
    assert utils.torch.device("meta") == torch.device("meta")


def test_apply_and_revert_twice() -> None:
    before = snapshot.of_megatron()
    megatron_patches.revert()
    megatron_patches.apply(ALL_GROUPS)
    once = snapshot.of_megatron()
    megatron_patches.apply(ALL_GROUPS)
    assert snapshot.differences(once, snapshot.of_megatron()) == set()
    megatron_patches.revert()
    megatron_patches.revert()
    assert snapshot.differences(before, snapshot.of_megatron()) == set()


@pytest.mark.parametrize("order", [("hooks", "cpu"), ("cpu", "hooks")])
def test_groups_can_be_applied_one_after_the_other(order: tuple[str, ...]) -> None:
    before = snapshot.of_megatron()
    for group in order:
        megatron_patches.apply([group])
    states = [state for state in megatron_patches.states() if state.patch.group in order]
    assert [state.patch for state in states if state.is_applied] == needed_patches()
    assert [state.patch for state in states if state.is_needed] == needed_patches()
    megatron_patches.revert()
    assert snapshot.differences(before, snapshot.of_megatron()) == set()


def test_default_groups_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert megatron_patches.default_groups() == ("hooks",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert megatron_patches.default_groups() == ("hooks", "cpu")


def test_an_untested_version_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    before = snapshot.of_megatron()
    with pytest.raises(errors.UnsupportedVersionError) as caught:
        megatron_patches.apply(ALL_GROUPS)
    assert caught.value.violations == (
        f"megatron-core 0.99.0 is imported from {megatron.core.__file__}, but the patches were tested only with "
        f"{', '.join(CORE_VERSIONS)}: install or check out one of these, or allow this version",
    )
    assert snapshot.differences(before, snapshot.of_megatron()) == set()


def test_an_untested_version_can_be_allowed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(megatron.core, "__version__", f"{release_of(megatron.core.__version__)}.post1")
    with caplog.at_level("WARNING", "megatron_patches"):
        megatron_patches.apply(ALL_GROUPS, allow_version=True)
    assert megatron_patches.hooks_applied()
    assert f"{megatron.core.__version__} is imported" in caplog.text
    assert ", ".join(CORE_VERSIONS) in caplog.text


def test_this_version_is_one_that_the_patches_name() -> None:
    assert release_of(megatron.core.__version__) in CORE_VERSIONS


def test_a_missing_megatron_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(errors.PatchSetError, match="megatron-core is not installed; install it"):
        megatron_patches.apply(ALL_GROUPS)


def test_hooks_applied_follows_its_group() -> None:
    assert not megatron_patches.hooks_applied()
    megatron_patches.apply(("cpu",))
    assert not megatron_patches.hooks_applied()
    megatron_patches.apply(("hooks",))
    assert megatron_patches.hooks_applied()
    megatron_patches.revert()
    assert not megatron_patches.hooks_applied()


def test_an_unknown_group_changes_nothing() -> None:
    before = snapshot.of_megatron()
    with pytest.raises(errors.UnknownGroupError, match="gpu"):
        megatron_patches.apply(["gpu"])
    assert snapshot.differences(before, snapshot.of_megatron()) == set()


def test_modules_imported_later_are_patched_and_given_back() -> None:
    name = "megatron.core.energy_monitor"
    sys.modules.pop(name, None)
    megatron_patches.apply(("cpu",))
    module = importlib.import_module(name)
    assert module.torch is not torch
    assert type(module.__spec__.loader).__module__ != "megatron_patches.registry"
    megatron_patches.revert()
    assert module.torch is torch
    assert not any(type(finder).__module__ == "megatron_patches.registry" for finder in sys.meta_path)


def test_functions_taken_over_by_name_are_replaced_there_too() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    original = clip_grads.clip_grad_by_total_norm_fp32
    assert optimizer.clip_grad_by_total_norm_fp32 is original
    megatron_patches.apply(("cpu",))
    assert optimizer.clip_grad_by_total_norm_fp32 is clip_grads.clip_grad_by_total_norm_fp32 is not original


@pytest.mark.slow
def test_importing_the_package_needs_neither_megatron_nor_hybrid_engine() -> None:
    code = (
        "import sys, megatron_patches\n"
        "bad = [m for m in sys.modules if m.partition('.')[0] in ('megatron', 'hybrid_engine', 'vllm')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow  # imports Megatron
def test_with_a_gpu_the_stand_ins_for_it_are_not_imported() -> None:
    code = (
        "import sys, torch, megatron_patches.script, megatron.core.distributed.param_and_grad_buffer\n"
        "torch.cuda.is_available = lambda: True\n"
        "megatron_patches.apply(); megatron_patches.script.run_without_cuda()\n"
        "assert megatron_patches.hooks_applied()\n"
        "sys.exit(str([m for m in sys.modules if m.startswith('megatron_patches.cpu')]).strip('[]') or 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True)


def test_public_names() -> None:
    assert sorted(megatron_patches.__all__) == megatron_patches.__all__
    assert all(hasattr(megatron_patches, name) for name in megatron_patches.__all__)
