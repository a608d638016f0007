"""What the commands' options have in common: how they are read, and how invalid ones are refused, all at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import typer
from typer.models import OptionInfo

from hybrid_engine.advisor.sizes_text import whole_number
from hybrid_engine.errors import ConfigError, Violation, clipped

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
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
    """Return the directory of a model's config.json; that of an id is downloaded, or taken from the Hub's cache.

    Raises ConfigError under `key`; not for a directory without config.json, which whoever reads it says.
    """
    path = Path(model)
    if path.name == "config.json":
        return path.parent
    if path.exists() or not _HUB_ID.fullmatch(model):
        return path
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json")).parent
    except ImportError:
        reason, remedy = "huggingface_hub is not installed", "Install it, or name a directory"
    except (OSError, ValueError) as error:  # huggingface_hub's errors, and requests', are among them
        reason = clipped(str(error).strip().partition("\n")[0] or type(error).__name__)
        remedy = "Correct the id, or name a directory with a config.json"
    raise ConfigError(
        [Violation(key, f"{model} is no directory here, and not to be had from the Hub: {reason}", remedy)]
    )


def name_of_model(model: str) -> str:
    """Return what to call it in a heading."""
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().parent.name if path.is_file() else path.resolve().name


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
