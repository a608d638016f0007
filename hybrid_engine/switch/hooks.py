"""Calls what users registered for the start and the end of a switch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., object])


class SwitchHooks:
    """Base of what has a start and an end that users may hear of."""

    def __init__(self) -> None:
        self._start_hooks: list[Callable[..., object]] = []
        self._end_hooks: list[Callable[..., object]] = []

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Call `hook(from_state, to_state)` before every switch, or `hook()`; usable as a decorator."""
        self._start_hooks.append(hook)
        return hook

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Call `hook(report)` after every successful switch, or `hook()`; usable as a decorator."""
        self._end_hooks.append(hook)
        return hook

    def _call_start_hooks(self, before: object, target: object) -> None:
        for hook in self._start_hooks:
            call_hook(hook, before, target)

    def _call_end_hooks(self, report: object) -> None:
        for hook in self._end_hooks:
            call_hook(hook, report)


def call_hook(hook: Callable[..., object], *arguments: Any) -> None:
    """Call with as many of the arguments as the hook takes: one that only logs a line needs none."""
    kinds = [parameter.kind for parameter in inspect.signature(hook).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = arguments[: sum(kind in positional for kind in kinds)]
    hook(*arguments)
