"""Options that the commands share: reads them, and refuses all invalid ones at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.models import ArgumentInfo, OptionInfo

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.config.loading import parsed_config
from hybrid_engine.errors import (
    ConfigError,
    DependencyError,
    FileError,
    ModelError,
    ReshardError,
    Violation,
    collect,
    shortened,
)
from hybrid_engine.files.documents import apply_overrides, read_yaml

MOST_RANKS = 2**17
"""Beyond these a plan would take minutes, and more memory than it tells of."""
_OVERRIDE = re.compile(r"[\w.]+=")


def integer_option(meaning: str) -> OptionInfo:
    """Return an option of the digits 0 to 9; Python's own numbers may have `_` and the digits of other scripts."""
    option: OptionInfo = typer.Option(help=meaning, parser=_parse_integer, metavar="INTEGER")
    return option


def config_argument() -> ArgumentInfo:
    """Return the argument that names the configuration, and its overrides."""
    argument: ArgumentInfo = typer.Argument(
        metavar="CONFIG.yaml|KEY=VALUE",
        help="The job's configuration, and keys that are set as if they stood in it, for example "
        "actor_config.tensor_model_parallel_size=4. Without a file keys alone, of which `model` is needed: a Hugging "
        "Face id (org/name) or a directory with a config.json. Needs no weights.",
        show_default=False,
    )
    return argument


def read_config(words: Sequence[str], ranks: int, *, sizes_are_open: bool = False) -> HybridConfig:
    """Return the configuration that the words of `config_argument` make, checked. Raises ConfigError.

    `sizes_are_open`: sizes may be left out, so that rules are not checked yet.
    """
    files = [word for word in words if not _OVERRIDE.match(word)]
    found = [Violation("CONFIG", f"more than one file: {shortened(each)}", "Name one") for each in files[1:]]
    found += _rank_violations(ranks)
    values = (collect(found, read_yaml, files[0], "CONFIG") if files else None) or {}
    found += apply_overrides(values, [word for word in words if _OVERRIDE.match(word)])
    if found:
        raise ConfigError(found)
    directory = Path(files[0]).absolute().parent if files else None
    return check_config(values, ranks, directory, sizes_are_open=sizes_are_open)


def check_config(
    values: Mapping[str, Any], ranks: int, directory: Path | None, *, sizes_are_open: bool = False
) -> HybridConfig:
    """Return the configuration of a mapping, checked; arguments are `load_config`'s. Raises ConfigError."""
    if found := list(_rank_violations(ranks)):
        raise ConfigError(found)
    try:
        if sizes_are_open:
            return parsed_config(values, directory)[0]
        return load_config(values, ranks, weights_only=True, own_weights=True, directory=directory)
    except DependencyError as error:  # a model on the Hub, without huggingface_hub
        raise ConfigError([Violation("model", str(error), "Or name a directory")]) from error


def _rank_violations(ranks: int) -> Iterator[Violation]:
    if not 1 <= ranks <= MOST_RANKS:
        yield Violation("--ranks", f"{ranks} ranks", f"Use 1 to {MOST_RANKS}")


def _parse_integer(text: str) -> int:
    if not re.fullmatch("[0-9]{1,30}", str(text)):
        raise typer.BadParameter(f"{shortened(text)} is not a whole number")
    return int(text)


@contextmanager
def refusing() -> Iterator[None]:
    """End the command with what is wrong where the block raises it: status 2, or 3 for ranks or engines that ended."""
    try:
        yield
    except ConfigError as error:
        refuse(error.findings)
    except (FileError, ModelError, ReshardError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3 if isinstance(error, ReshardError) else 2) from None


def refuse(found: Sequence[Violation]) -> NoReturn:
    """End the command with status 2 and every violation on stderr."""
    if len(found) == 1:
        typer.echo(f"Error: {found[0]}", err=True)
    else:
        _, *lines = str(ConfigError(found)).splitlines()
        typer.echo("\n".join((f"{len(found)} errors:", *lines)), err=True)
    raise typer.Exit(2)
