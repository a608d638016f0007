"""Replacements at run time: undone whatever happens."""

from __future__ import annotations

import contextlib
import gc
import string
import weakref
from string import Template

import pytest

from hybrid_engine.backends.vllm.internals import Patch
from hybrid_engine.errors import DependencyError, StateError

TEMPLATE = Patch("string:Template.delimiter", "tests", remove_when="never")
GREET = Patch("string:Template.greet", "tests", remove_when="never")


class Owner:
    """Something with a method, as vLLM's worker has one."""

    def greet(self) -> str:
        return "as it was"


def test_a_replacement_is_made_from_the_original_and_undone() -> None:
    with TEMPLATE.replaced(lambda before: before * 2):
        assert Template.delimiter == "$$"
    assert Template.delimiter == "$"


def test_a_function_of_a_module_is_replaced_too() -> None:
    original = string.capwords
    with Patch("string:capwords", "tests").replaced(lambda capwords: lambda text: capwords(text) + "!"):
        assert string.capwords("a b") == "A B!"
    assert string.capwords is original


def test_it_is_undone_after_an_error_too() -> None:
    with pytest.raises(KeyboardInterrupt), TEMPLATE.replaced(lambda before: before * 2):
        raise KeyboardInterrupt
    assert Template.delimiter == "$"


def test_a_replacement_that_cannot_be_built_changes_nothing() -> None:
    with pytest.raises(TypeError), TEMPLATE.replaced(lambda before: before + 1):
        pass
    with TEMPLATE.replaced(lambda before: before * 2):
        assert Template.delimiter == "$$"


def test_contexts_nest() -> None:
    with TEMPLATE.replaced(lambda before: before * 2):
        with TEMPLATE.replaced(lambda before: before + "."):
            assert Template.delimiter == "$$."
        assert Template.delimiter == "$$"
    assert Template.delimiter == "$"


def test_one_that_ends_before_those_in_it_leaves_theirs_and_says_so() -> None:
    owner = Owner()
    outer, inner = (GREET.replaced(lambda greet: lambda: greet() + "!", owner=owner) for _ in range(2))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(StateError, match=r"string:Template\.greet was replaced by somebody else"):
        outer.__exit__(None, None, None)
    assert owner.greet() == "as it was!!"
    inner.__exit__(None, None, None)
    assert owner.greet() == "as it was!"


def test_what_somebody_else_replaced_meanwhile_is_left_to_them_and_said() -> None:
    owner = Owner()
    with (
        pytest.raises(StateError, match="was replaced by somebody else"),
        GREET.replaced(lambda _: lambda: "ours", owner=owner),
    ):
        owner.greet = lambda: "theirs"  # type: ignore[method-assign]
    assert owner.greet() == "theirs"
    with GREET.replaced(lambda _: lambda: "ours again", owner=owner):
        assert owner.greet() == "ours again"
    assert owner.greet() == "theirs"


def test_an_error_is_not_hidden_by_what_somebody_else_replaced() -> None:
    owner = Owner()
    with pytest.raises(MemoryError), GREET.replaced(lambda _: lambda: "ours", owner=owner):
        owner.greet = lambda: "theirs"  # type: ignore[method-assign]
        raise MemoryError
    with GREET.replaced(lambda _: lambda: "ours again", owner=owner):
        assert owner.greet() == "ours again"


def test_one_object_is_changed_and_then_as_it_was() -> None:
    one, other = Owner(), Owner()
    with GREET.replaced(lambda greet: lambda: greet().upper(), owner=one):
        assert (one.greet(), other.greet()) == ("AS IT WAS", "as it was")
        with GREET.replaced(lambda _: lambda: "too", owner=other):
            assert other.greet() == "too"
    assert vars(one) == vars(other) == {}


def test_an_object_that_is_dropped_replaced_is_collected() -> None:
    """As an engine with LoRA is that nobody shut down: its own method, the original, must not keep it."""
    owner = Owner()
    held = contextlib.ExitStack()
    held.enter_context(GREET.replaced(lambda greet: lambda: greet().upper(), owner=owner))
    vars(owner)["held"] = held
    gone = weakref.ref(owner)
    del owner, held
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("target", ["string:Template.nothing", "string:Nothing.delimiter"])
def test_a_missing_target_raises(target: str) -> None:
    with pytest.raises(DependencyError, match="is missing"), Patch(target, "tests").replaced(lambda before: before):
        pass
