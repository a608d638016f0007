"""Calls what users registered for the start and the end of a switch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., object])


def call_hook(hook: Callable[..., object], *arguments: Any) -> None:
    """Call with as many of the arguments as the hook takes: one that only logs a line needs none."""
    kinds = [parameter.kind for parameter in inspect.signature(hook).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = arguments[: sum(kind in positional for kind in kinds)]
    hook(*arguments)
