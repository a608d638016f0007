"""Hooks get as many of the arguments as they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hybrid_engine.switch.hooks import call_hook


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def nothing(self) -> None:
        self.seen.append(())

    def one(self, report: object) -> None:
        self.seen.append((report,))

    def defaulted(self, report: object = None, *, verbose: bool = False) -> None:
        self.seen.append((report, verbose))

    def everything(self, *arguments: object) -> None:
        self.seen.append(arguments)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nothing", ()), ("one", ("before",)), ("defaulted", ("before", False)), ("everything", ("before", "after"))],
)
@pytest.mark.parametrize("wrap", [lambda hook: hook, partial], ids=["method", "partial"])
def test_a_hook_gets_what_it_takes(
    name: str, expected: tuple[object, ...], wrap: Callable[..., Callable[..., None]]
) -> None:
    recorder = Recorder()
    call_hook(wrap(getattr(recorder, name)), "before", "after")
    assert recorder.seen == [expected]


def test_its_own_errors_are_not_taken_for_wrong_arguments() -> None:
    def broken() -> None:
        raise TypeError("takes 0 positional arguments but 1 was given")

    with pytest.raises(TypeError, match="takes 0"):
        call_hook(broken, "report")
