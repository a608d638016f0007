"""What the commands' options have in common: how they are read, and how invalid ones are refused, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NoReturn, ParamSpec, TypeVar

import typer
from typer.models import OptionInfo

from hybrid_engine.advisor.sizes_text import whole_number
from hybrid_engine.errors import ConfigError, Violation

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Order(StrEnum):
    """Which rank takes which inference position."""

    AUTO = "auto"
    SEQUENTIAL = "sequential"


def integer_option(meaning: str) -> OptionInfo:
    """Return an option of the digits 0 to 9; Python's own numbers may have `_` and the digits of other scripts."""
    option: OptionInfo = typer.Option(help=meaning, parser=_parse_integer, metavar="INTEGER")
    return option


def _parse_integer(text: str) -> int:
    try:
        return whole_number(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def collect(
    found: list[Violation],
    function: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result | None:
    """Return the function's result, or None after adding the violations of its ConfigError to `found`."""
    try:
        return function(*args, **kwargs)
    except ConfigError as error:
        found.extend(error.findings)
        return None


def refuse(found: Sequence[Violation]) -> NoReturn:
    """End the command with status 2 and every violation on stderr."""
    typer.echo(str(ConfigError(found)), err=True)
    raise typer.Exit(2)
