"""The registry on patches made for the purpose: what it refuses, and how it restores."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron
import pytest

from megatron_patches import errors
from megatron_patches.patch import CORE_VERSIONS, MISSING, Patch, release_of
from megatron_patches.registry import PatchRegistry
from tests.megatron_patches import snapshot

TOY = "megatron.toy_for_tests"


def make_patch(attr_path: str, build: Callable[[Any], Any] = lambda original: object(), **more: Any) -> Patch:
    fields = {
        "name": f"toy.{attr_path}",
        "group": "hooks",
        "target": f"{TOY}:{attr_path}",
        "reason": "a test",
        "versions": CORE_VERSIONS,
        "remove_when": "never",
        **more,
    }
    return Patch(build=build, **fields)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module inside megatron with one of everything that can be patched."""
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
    for expected in ("no_such_function", "NoClass", "no_such_module", "both toy.function and toy.rival"):
        assert expected in text
    assert dict(vars(toy)) == before


def test_one_function_under_two_names_is_claimed_twice(toy: types.ModuleType) -> None:
    toy.alias = toy.function
    with pytest.raises(errors.PatchSetError, match=r"both toy\.function and toy\.alias"):
        PatchRegistry().apply([make_patch("function"), make_patch("alias")])


def test_a_missing_target_alone(toy: types.ModuleType) -> None:
    with pytest.raises(errors.PatchSetError, match="no_such_function"):
        PatchRegistry().apply([make_patch("no_such_function")])


def test_a_double_claim_alone(toy: types.ModuleType) -> None:
    patches = [make_patch("function"), make_patch("function", name="toy.rival")]
    with pytest.raises(errors.PatchSetError, match="merge the two"):
        PatchRegistry().apply(patches)
    assert toy.function() == "function"


def test_tested_versions_are_listed_as_versions(toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", "1.0.0")
    with pytest.raises(errors.UnsupportedVersionError, match=r"only with 0\.9\.0, 0\.16\.1: install"):
        PatchRegistry().apply([make_patch("function", versions=("0.16.1", "0.9.0"))])


def test_only_the_versions_of_the_patches_in_question_are_named(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.__version__", "1.0.0")
    patches = [make_patch("function", versions=("1.0.0", "2.0.0")), make_patch("value", versions=("0.9.0",))]
    with pytest.raises(errors.UnsupportedVersionError, match=r"tested only with 0\.9\.0: install"):
        PatchRegistry().apply(patches)


def test_an_older_megatron_goes_without_what_it_does_not_have(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = ("0.9.10", "1.0.0")
    later = make_patch("no_such_function", versions=versions, since="1.0.0")
    registry, patches = PatchRegistry(), [make_patch("function", versions=versions), later]
    monkeypatch.setattr("megatron.core.__version__", "0.9.10")
    registry.apply(patches)
    registry.apply(patches)
    assert [registry.has(patch) for patch in patches] == [True, False]
    registry.revert()
    monkeypatch.setattr("megatron.core.__version__", "1.0.0")
    with pytest.raises(errors.PatchSetError, match="no_such_function"):
        registry.apply(patches)


def test_a_package_wide_patch_covers_what_another_target_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_for_tests.py").write_text("import only_of_this_test\ndef function(): return 'function'\n")
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


def test_a_newer_megatron_goes_without_what_it_no_longer_has(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = make_patch("no_such_function", versions=("1.0.0",), until="1.0.0")
    registry, patches = PatchRegistry(), [make_patch("function", versions=("1.0.0",)), ended]
    monkeypatch.setattr("megatron.core.__version__", "1.0.0+0123abc")  # as a checkout calls itself since 0.18
    registry.apply(patches)
    assert [registry.has(patch) for patch in patches] == [True, False]
    registry.revert()


@pytest.mark.parametrize(
    ("version", "release"), [("0.16.1", "0.16.1"), ("0.19.2+571370c82", "0.19.2"), ("0.19.1+5be962670", "0.19.2")]
)
def test_a_checkout_counts_as_the_release_that_it_is(version: str, release: str) -> None:
    assert release_of(version) == release
    assert release in CORE_VERSIONS


def test_a_claim_on_what_another_group_has_already_patched(toy: types.ModuleType) -> None:
    registry = PatchRegistry()
    registry.apply([make_patch("function")])
    with pytest.raises(errors.PatchSetError, match=r"both toy\.function and toy\.rival"):
        registry.apply([make_patch("function", name="toy.rival", group="cpu")])
    registry.revert()
    assert toy.function() == "function"


def test_an_inherited_attribute_is_deleted_again(toy: types.ModuleType) -> None:
    registry = PatchRegistry()
    registry.apply([make_patch("Child.method", lambda original: lambda self: f"new {original(self)}")])
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


def test_descriptors_survive(toy: types.ModuleType) -> None:
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


def test_revert_refuses_when_someone_patched_over_us(toy: types.ModuleType) -> None:
    original = toy.function
    registry = PatchRegistry()
    registry.apply([make_patch("function"), make_patch("value")])
    ours, foreign = toy.function, object()
    toy.function = foreign
    with pytest.raises(errors.PatchSetError, match="replaced by somebody else"):
        registry.revert()
    assert toy.function is foreign
    assert toy.value != 1
    toy.function = ours
    registry.revert()
    assert toy.function is original


def test_names_taken_over_after_apply_are_given_back(toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
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

    before = snapshot.of_megatron()
    with pytest.raises(RuntimeError, match="cannot build"):
        PatchRegistry().apply([make_patch("value"), make_patch("function", fail)])
    assert snapshot.differences(before, snapshot.of_megatron()) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": "gpu"},
        {"target": "no_colon"},
        {"target": "megatron.*:two.steps"},
        {"reason": ""},
        {"versions": ()},
        {"remove_when": ""},
    ],
)
def test_a_bad_record_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"patch 'toy\.function'"):
        make_patch("function", **wrong)
