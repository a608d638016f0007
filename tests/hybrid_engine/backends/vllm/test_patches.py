"""Replacements at run time: undone whatever happens, never made twice, and only in the version they were tried with."""

from __future__ import annotations

import os

import pytest

from hybrid_engine.backends.vllm import patches
from hybrid_engine.backends.vllm.patches import Patch
from hybrid_engine.errors import DependencyError, StateError

TEMPLATE = Patch("string:Template.delimiter", "tests", "never")


class Owner:
    value = "as it was"


@pytest.fixture(autouse=True)
def _tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "require_vllm", lambda: f"{patches.TESTED_VERSION}+cpu")


def delimiter() -> str:
    import string

    return string.Template.delimiter


def test_a_replacement_is_made_from_the_original_and_undone() -> None:
    with TEMPLATE.replaced(lambda before: before * 2):
        assert delimiter() == "$$"
    assert delimiter() == "$"


def test_it_is_undone_after_an_error_too() -> None:
    with pytest.raises(KeyboardInterrupt), TEMPLATE.replaced(lambda before: before * 2):
        raise KeyboardInterrupt
    assert delimiter() == "$"


def test_a_second_claim_raises_and_changes_nothing() -> None:
    other = Patch(TEMPLATE.target, "another", "never")
    with TEMPLATE.replaced(lambda before: "first"):
        with pytest.raises(StateError, match=r"string:Template\.delimiter is replaced already"):
            other.replace(lambda before: "second")
        assert delimiter() == "first"
    assert delimiter() == "$"


def test_what_somebody_else_replaced_meanwhile_is_not_undone() -> None:
    owner = Owner()
    replaced = Patch("string:Template.value", "tests", "never").replace(lambda _: "ours", owner=owner)
    owner.value = "theirs"
    with pytest.raises(StateError, match="was replaced by somebody else"):
        replaced.revert()
    assert owner.value == "theirs"
    owner.value = "ours"
    replaced.revert()
    assert owner.value == "as it was"


def test_one_object_is_changed_and_known_to_be_until_it_is_gone() -> None:
    patch = Patch("string:Template.value", "tests", "never")
    one, other = Owner(), Owner()
    patch.replace(lambda before: before.upper(), owner=one)
    assert (one.value, other.value) == ("AS IT WAS", "as it was")
    assert patch.is_replaced(one)
    assert not patch.is_replaced(other)
    with pytest.raises(StateError, match="is replaced already"):
        patch.replace(lambda before: "again", owner=one)
    patch.replace(lambda before: "too", owner=other)
    del one, other
    patch.replace(lambda before: "a new object", owner=Owner())


def test_a_variable_of_the_environment_is_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with patches.RANK.replaced(lambda before: str(int(before) % 2)):
        assert os.environ["RANK"] == "1"
        with pytest.raises(StateError):
            patches.RANK.replace(lambda before: before)
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize("target", ["string:Template.nothing", "string:Nothing.delimiter"])
def test_a_missing_target_raises(target: str) -> None:
    with pytest.raises(DependencyError, match="is missing"):
        Patch(target, "tests", "never").replace(lambda before: before)


def test_another_version_raises_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "require_vllm", lambda: "0.33.0")
    with pytest.raises(DependencyError, match=r"with vLLM 0\.32\.0 only: tests"):
        TEMPLATE.replace(lambda before: "new")
    assert delimiter() == "$"


def test_records_say_everything() -> None:
    assert all(isinstance(patch, Patch) for patch in patches.PATCHES)
    found = [value for value in vars(patches).values() if isinstance(value, Patch)]
    assert {patch.target for patch in found} == {patch.target for patch in patches.PATCHES}
