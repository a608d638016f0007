"""Mutants: the product without one of its waits.

with mutant.applied():          calls of a function, or those from another function, do nothing
    scenario()                  needs the wait; passes without a mutant
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

CHECKER_REPORT = "^(RACE|RELEASE): "


def _does_nothing(*_arguments: object, **_named: object) -> None: ...


@dataclass(frozen=True)
class Mutant:
    """A replaced function of the product, or of torch as called by the product.

    Attributes:
        scenario: name of the scenario that needs the function.
        owner, name: object and name of the function.
        within: function whose calls are replaced; None: all calls.
        replacement: function that is called instead.
        noticed: pattern of the checker's report, or of the product's error.
    """

    scenario: str
    owner: object
    name: str
    within: Callable[..., Any] | None = None
    replacement: Callable[..., Any] = _does_nothing
    noticed: str = CHECKER_REPORT

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = getattr(self.owner, self.name)
        caller = None if self.within is None else inspect.unwrap(self.within).__code__

        def replaced(*arguments: Any, **named: Any) -> Any:
            is_meant = caller is None or sys._getframe(1).f_code is caller
            return (self.replacement if is_meant else original)(*arguments, **named)

        with mock.patch.object(self.owner, self.name, replaced):
            yield
