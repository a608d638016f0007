"""What the commands' options have in common: how they are read, and how invalid ones are refused, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import typer
from typer.models import OptionInfo

from hybrid_engine.advisor.sizes_text import whole_number
from hybrid_engine.errors import ConfigError, DependencyError, Violation
from hybrid_engine.files.hub import find_model

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


def model_option() -> OptionInfo:
    """Return the option that names the model."""
    option: OptionInfo = typer.Option(
        help="Hugging Face model: an id (org/name), a directory with a config.json, or that file. Needs no weights."
    )
    return option


def model_directory(model: str, key: str = "--model") -> Path:
    """Return the directory of a model's config.json. Raises ConfigError under `key`."""
    try:
        return find_model(model, key=key)
    except DependencyError as error:
        raise ConfigError([Violation(key, str(error), "Or name a directory")]) from error


def name_of_model(model: str) -> str:
    """Return what to call it in a heading."""
    path = Path(model)
    if not path.exists():
        return model
    # not resolved: a file of the Hub's cache is a link to one that is named after its content
    return path.absolute().parent.name if path.is_file() else path.resolve().name


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
    if len(found) == 1:
        typer.echo(f"Error: {found[0]}", err=True)
    else:
        _, *lines = str(ConfigError(found)).splitlines()
        typer.echo("\n".join((f"{len(found)} errors:", *lines)), err=True)
    raise typer.Exit(2)
