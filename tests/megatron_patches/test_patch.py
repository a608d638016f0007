"""Artificial and real patches: refusals, effects, and complete reverts."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron
import megatron.core
import pytest
import torch
from typer.testing import CliRunner

import megatron_patches
from megatron_patches import errors
from megatron_patches.__main__ import app, main
from megatron_patches.patch import (
    CORE_VERSIONS,
    MISSING,
    Patch,
    PatchRegistry,
    default_groups,
    patches_of,
    release_of,
)
from tests.harness.values import Values
from tests.hybrid_engine.tools.programs import run_python

TOY = "megatron.toy_for_tests"


def make_patch(
    attr_path: str, build: Callable[[Any], Any] = lambda original: object(), **more: Any
) -> Patch:
    fields = {
        "name": f"toy.{attr_path}",
        "group": "hooks",
        "target": f"{TOY}:{attr_path}",
        "reason": "a test",
        "remove_when": "never",
        **more,
    }
    return Patch(build=build, **fields)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Create a module in megatron with a target of every kind."""
    module = types.ModuleType(TOY)
    source = """
class Parent:
    def method(self): return "parent"

class Child(Parent):
    @staticmethod
    def static(value): return ("static", value)
    @classmethod
    def of_class(cls, value): return (cls.__name__, value)
    @property
    def prop(self): return "prop"

def function(): return "function"
value = 1
"""
    exec(source, vars(module))
    for owner in (module.Parent, module.Child, module.function):
        owner.__module__ = TOY
    monkeypatch.setitem(sys.modules, TOY, module)
    return module


def test_missing_targets_and_double_claims_are_listed_together(toy: types.ModuleType) -> None:
    patches = [
        make_patch("no_such_function"),
        make_patch("NoClass.method"),
        make_patch("function"),
        make_patch("function", name="toy.rival"),
        make_patch("x", name="toy.no_module", target="megatron.no_such_module:x"),
    ]
    before = dict(vars(toy))
    with pytest.raises(errors.PatchSetError) as caught:
        PatchRegistry().apply(patches)
    text = "\n".join(caught.value.violations)
    assert len(caught.value.violations) == 4
    for expected in (
        "no_such_function",
        "NoClass",
        "no_such_module",
        "both toy.function and toy.rival",
    ):
        assert expected in text
    assert dict(vars(toy)) == before


def test_one_function_under_two_names_is_claimed_twice(toy: types.ModuleType) -> None:
    toy.alias = toy.function
    with pytest.raises(errors.PatchSetError, match=r"both toy\.function and toy\.alias"):
        PatchRegistry().apply([make_patch("function"), make_patch("alias")])


@pytest.mark.parametrize(
    ("span", "version"), [({"since": "0.19.0"}, "0.16.1"), ({"until": "0.19.0"}, "0.19.2+0123abc")]
)
def test_patches_of_other_versions_are_not_applied(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch, span: dict[str, str], version: str
) -> None:
    registry = PatchRegistry()
    patches = [make_patch("function"), make_patch("no_such_function", **span)]
    monkeypatch.setattr("megatron.core.__version__", version)
    registry.apply(patches)
    registry.apply(patches)
    assert [registry.has(patch) for patch in patches] == [True, False]
    registry.revert()
    monkeypatch.setattr("megatron.core.__version__", "0.19.2" if version == "0.16.1" else "0.16.1")
    with pytest.raises(errors.PatchSetError, match="no_such_function"):
        registry.apply(patches)


def test_a_package_wide_patch_covers_modules_imported_for_other_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_for_tests.py").write_text(
        "import only_of_this_test\ndef function(): return 'function'\n"
    )
    monkeypatch.setitem(sys.modules, "only_of_this_test", types.ModuleType("only_of_this_test"))
    monkeypatch.setattr(megatron, "__path__", [*megatron.__path__, str(tmp_path)])
    target = "megatron.imported_for_tests:function"
    wide = make_patch("only_of_this_test", target="megatron.*:only_of_this_test")
    registry = PatchRegistry()
    try:
        registry.apply([wide, make_patch("function", target=target)])
        module = sys.modules["megatron.imported_for_tests"]
        assert module.only_of_this_test is not sys.modules["only_of_this_test"]
        registry.revert()
        assert module.only_of_this_test is sys.modules["only_of_this_test"]
    finally:
        sys.modules.pop("megatron.imported_for_tests", None)


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.16.1", "0.16.1"), ("0.19.2+571370c82", "0.19.2"), ("0.19.1+5be962670", "0.19.2")],
)
def test_a_checkout_counts_as_its_release(version: str, release: str) -> None:
    assert release_of(version) == release
    assert release in CORE_VERSIONS


def test_a_target_patched_by_another_group_is_refused(toy: types.ModuleType) -> None:
    registry = PatchRegistry()
    registry.apply([make_patch("function")])
    with pytest.raises(errors.PatchSetError, match=r"both toy\.function and toy\.rival"):
        registry.apply([make_patch("function", name="toy.rival", group="cpu")])
    registry.revert()
    assert toy.function() == "function"


def test_an_inherited_attribute_is_deleted_again(toy: types.ModuleType) -> None:
    registry = PatchRegistry()
    registry.apply(
        [make_patch("Child.method", lambda original: lambda self: f"new {original(self)}")]
    )
    assert toy.Child().method() == "new parent"
    assert toy.Parent().method() == "parent"
    registry.revert()
    assert "method" not in vars(toy.Child)
    assert toy.Child().method() == "parent"


def test_an_attribute_that_did_not_exist_is_deleted_again(toy: types.ModuleType) -> None:
    patch = make_patch("invented", lambda original: original is MISSING, may_be_missing=True)
    registry = PatchRegistry()
    registry.apply([patch])
    assert toy.invented is True
    registry.revert()
    assert not hasattr(toy, "invented")


def test_descriptors_keep_their_kind(toy: types.ModuleType) -> None:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: ("patched", original(*args))

    before = dict(vars(toy.Child))
    registry = PatchRegistry()
    registry.apply([make_patch("Child.static", around), make_patch("Child.of_class", around)])
    assert isinstance(vars(toy.Child)["static"], staticmethod)
    assert isinstance(vars(toy.Child)["of_class"], classmethod)
    assert toy.Child.static(1) == toy.Child().static(1) == ("patched", ("static", 1))
    assert toy.Child.of_class(2) == toy.Child().of_class(2) == ("patched", ("Child", 2))
    registry.revert()
    assert all(vars(toy.Child)[name] is value for name, value in before.items())


def test_revert_refuses_if_other_code_replaced_a_patch(toy: types.ModuleType) -> None:
    original = toy.function
    registry = PatchRegistry()
    registry.apply([make_patch("function"), make_patch("value")])
    ours = toy.function
    foreign = object()
    toy.function = foreign
    with pytest.raises(errors.PatchSetError, match="replaced by other code"):
        registry.revert()
    assert toy.function is foreign
    assert toy.value != 1
    toy.function = ours
    registry.revert()
    assert toy.function is original


def test_names_imported_after_apply_are_restored(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = toy.function
    registry = PatchRegistry()
    registry.apply([make_patch("function")])
    late = types.ModuleType(f"{TOY}_late")
    late.borrowed = toy.function
    monkeypatch.setitem(sys.modules, late.__name__, late)
    registry.revert()
    assert late.borrowed is original


def test_a_failing_build_changes_nothing(toy: types.ModuleType) -> None:
    def fail(original: Any) -> Any:
        raise RuntimeError("cannot build")

    with unchanged("megatron"), pytest.raises(RuntimeError, match="cannot build"):
        PatchRegistry().apply([make_patch("value"), make_patch("function", fail)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": "gpu"},
        {"target": "no_colon"},
        {"target": "megatron.*:two.steps"},
        {"reason": ""},
        {"remove_when": ""},
    ],
)
def test_a_bad_patch_record_is_refused(wrong: Values) -> None:
    with pytest.raises(ValueError, match=r"patch 'toy\.function'"):
        make_patch("function", **wrong)


Snapshot = dict[tuple[str, str], Any]


@contextmanager
def unchanged(*packages: str) -> Iterator[None]:
    """Check that the block leaves all attributes of these packages' modules and classes."""
    before = {package: snapshot(package) for package in packages}
    yield
    for package in packages:
        assert differences(before[package], snapshot(package)) == set(), package


def snapshot(package: str = "megatron") -> Snapshot:
    """Return every attribute of every loaded module of a package and of their classes."""
    result = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and isinstance(module, ModuleType):
            for attr, value in list(vars(module).items()):
                result[name, attr] = value
                if (
                    issubclass(type(value), type) and value.__module__ == name
                ):  # isinstance() would run code of the value.
                    _add_class(result, f"{name}.{value.__qualname__}", value)
    return result


def _add_class(result: Snapshot, name: str, owner: type) -> None:
    for attr, value in vars(owner).items():
        result[name, attr] = value
        if isinstance(value, type) and value.__qualname__.startswith(f"{owner.__qualname__}."):
            _add_class(result, f"{name}.{attr}", value)


def differences(before: Snapshot, after: Snapshot) -> set[tuple[str, str]]:
    missing = object()
    return {
        key
        for key in before.keys() | after.keys()
        if before.get(key, missing) is not after.get(key, missing)
    }


ALL_GROUPS = ("hooks", "routers", "without_te", "cpu")
"""All groups that need no source tree."""


@pytest.fixture(autouse=True)
def _targets_loaded() -> None:
    load_targets()


def load_targets() -> None:
    """Import what apply() imports, so that snapshots before and after have the same modules."""
    for patch in needed_patches():
        importlib.import_module(patch.module_name)


def needed_patches() -> list[Patch]:
    """Return the patches that apply() applies to this megatron-core."""
    return [
        patch for patch in patches_of(ALL_GROUPS) if patch.is_needed_by(megatron.core.__version__)
    ]


def first_cycle() -> None:
    """Check that the first apply() and revert() of a process leave megatron and torch unchanged."""
    load_targets()
    importlib.import_module(
        "megatron.core.dist_checkpointing.strategies.torch"
    )  # A module of Megatron named torch.
    with unchanged("megatron", "torch"):
        before = snapshot()
        megatron_patches.apply(ALL_GROUPS)
        assert len(differences(before, snapshot())) > len(needed_patches())
        megatron_patches.revert()


@pytest.mark.slow  # Imports Megatron.
def test_the_first_revert_restores_every_attribute() -> None:
    """Runs in a new process: earlier cycles in this one could have left changes that both snapshots
    contain.

    Without a timeout of its own, because importing all of Megatron takes minutes on a busy machine.
    """
    run_python("-c", f"from {__name__} import first_cycle; first_cycle()", status=0, timeout=None)


def test_torch_is_unchanged_while_patches_are_applied() -> None:
    with unchanged("torch"):
        megatron_patches.apply(ALL_GROUPS)
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
    with unchanged("megatron"):
        megatron_patches.revert()
        megatron_patches.apply(ALL_GROUPS)
        with unchanged("megatron"):
            megatron_patches.apply(ALL_GROUPS)
        megatron_patches.revert()
        megatron_patches.revert()


def test_default_groups_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert megatron_patches.default_groups() == ("hooks", "routers", "without_te")
    monkeypatch.setattr(
        "megatron_patches.patch.find_spec", lambda _name: ModuleSpec("transformer_engine", None)
    )
    assert megatron_patches.default_groups() == ("hooks", "routers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert megatron_patches.default_groups() == ("hooks", "routers", "cpu")


def test_an_untested_version_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with unchanged("megatron"), pytest.raises(errors.UnsupportedVersionError) as caught:
        megatron_patches.apply(ALL_GROUPS)
    assert caught.value.violations == (
        f"megatron-core 0.99.0 is imported from {megatron.core.__file__}, but the "
        "patches were tested only with "
        f"{', '.join(CORE_VERSIONS)}: install or check out one of these, or allow this version",
    )


def test_an_untested_version_can_be_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        megatron.core, "__version__", f"{release_of(megatron.core.__version__)}.post1"
    )
    with caplog.at_level("WARNING", "megatron_patches"):
        megatron_patches.apply(ALL_GROUPS, allow_version=True)
    assert megatron_patches.hooks_applied()
    assert f"{megatron.core.__version__} is imported" in caplog.text
    assert ", ".join(CORE_VERSIONS) in caplog.text


def test_a_missing_megatron_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with unchanged("megatron"), pytest.raises(errors.UnknownGroupError, match="gpu"):
        megatron_patches.apply(["gpu"])


def test_modules_imported_later_are_patched_and_restored() -> None:
    name = "megatron.core.energy_monitor"
    sys.modules.pop(name, None)
    megatron_patches.apply(("cpu",))
    module = importlib.import_module(name)
    assert module.torch is not torch
    assert type(module.__spec__.loader).__module__ != "megatron_patches.patch"
    megatron_patches.revert()
    assert module.torch is torch
    assert not any(type(finder).__module__ == "megatron_patches.patch" for finder in sys.meta_path)


def test_functions_are_also_replaced_where_they_were_imported() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    original = clip_grads.clip_grad_by_total_norm_fp32
    assert optimizer.clip_grad_by_total_norm_fp32 is original
    megatron_patches.apply(("cpu",))
    assert (
        optimizer.clip_grad_by_total_norm_fp32
        is clip_grads.clip_grad_by_total_norm_fp32
        is not original
    )


@pytest.mark.slow
def test_importing_the_package_needs_neither_megatron_nor_hybrid_engine() -> None:
    run_python(
        "-c",
        "import sys, megatron_patches\n"
        "bad = [m for m in sys.modules if m.partition('.')[0] in ('megatron', "
        "'hybrid_engine', 'vllm')]\n"
        "sys.exit(str(bad) if bad else 0)",
        status=0,
    )


@pytest.mark.slow  # Imports Megatron.
def test_with_a_gpu_the_cpu_substitutes_are_not_imported() -> None:
    run_python(
        "-c",
        "import sys, torch, megatron_patches.script, "
        "megatron.core.distributed.param_and_grad_buffer\n"
        "torch.cuda.is_available = lambda: True\n"
        "megatron_patches.apply(); megatron_patches.script.apply_stand_ins()\n"
        "assert megatron_patches.hooks_applied()\n"
        "sys.exit(str([m for m in sys.modules if "
        "m.startswith('megatron_patches.cpu')]).strip('[]') or 0)",
        status=0,
    )


PATCHES = patches_of()


def unneeded_patches() -> list[Patch]:
    return [patch for patch in PATCHES if not patch.is_needed_by(megatron.core.__version__)]


def test_list_shows_every_patch_and_its_state() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0, result.output
    for patch in PATCHES:
        for text in (patch.name, f"[{patch.group}]", patch.target, patch.reason):
            assert text in result.output
    for patch in unneeded_patches():
        assert (
            f"not needed {f'before megatron-core {patch.since}' if patch.since else 'from'}"
            in result.output
        )
    others = [
        patch
        for patch in PATCHES
        if patch.group not in default_groups() and patch not in unneeded_patches()
    ]
    assert result.output.count("not needed") == len(unneeded_patches())
    assert result.output.count("not applied") == len(others)


def test_list_without_check_applies_nothing() -> None:
    result = CliRunner().invoke(app, ["list", "--no-check"])
    assert result.output.count("not applied") == len(PATCHES) - len(unneeded_patches())


def test_list_reports_an_untested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.1.0")
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 1
    assert "0.1.0" in result.output


def test_a_misspelt_command_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["megatron_patches", "patch-sorce"])
    with pytest.raises(SystemExit, match="Did you mean patch-source"):
        main()
