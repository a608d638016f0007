"""Mutants: the product with one of its waits taken away.

with mutant.applied():          calls of this name, or only those from one function, do nothing
    scenario()                  something for which the wait is needed; without a mutant it passes unnoticed
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

BY_THE_CHECKER = "^(RACE|RELEASE): "


def _does_nothing(*_arguments: object, **_named: object) -> None: ...


@dataclass(frozen=True)
class Mutant:
    """A function of the product, or of torch as the product calls it, and what takes its place.

    Attributes:
        scenario: name of what is done with it.
        owner, name: of the function, or of the method.
        within: the function whose calls alone are replaced; None: all calls.
        replacement: what is called instead.
        noticed: pattern of what the checker reports, or of what the product raises.
    """

    scenario: str
    owner: object
    name: str
    within: Callable[..., Any] | None = None
    replacement: Callable[..., Any] = _does_nothing
    noticed: str = BY_THE_CHECKER

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = getattr(self.owner, self.name)
        caller = None if self.within is None else inspect.unwrap(self.within).__code__

        def replaced(*arguments: Any, **named: Any) -> Any:
            is_meant = caller is None or sys._getframe(1).f_code is caller
            return (self.replacement if is_meant else original)(*arguments, **named)

        with mock.patch.object(self.owner, self.name, replaced):
            yield
