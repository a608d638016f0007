"""Options that the commands share, and the refusal of all invalid options at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.models import ArgumentInfo, OptionInfo

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import (
    ConfigError,
    DependencyError,
    FileError,
    ModelError,
    ReshardError,
    Violation,
    Violations,
    collect,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import apply_overrides, read_yaml
from hybrid_engine.tools.cli.output import end_without_answer

MAX_RANKS = 2**17
"""Largest number of ranks. Beyond it a plan takes minutes, and more memory than the planned job."""
OVERRIDE = re.compile(r"([\w.]+=.*)", re.DOTALL)
"""A key and its value; the group is all of it."""
CONFIG_ARGUMENT: ArgumentInfo = typer.Argument(
    metavar="CONFIG.yaml|MODEL|KEY=VALUE",
    help="The job's configuration or a model's directory, and keys to set, for example "
    "actor_config.tensor_model_parallel_size=4. "
    "Without a file, keys alone, of which `model` is required: "
    "a Hugging Face id (org/name) or a directory with a config.json. Needs no weights.",
    show_default=False,
)
"""The configuration file and overrides of its keys."""


def integer_option(meaning: str) -> OptionInfo:
    """Return an option for a number in the digits 0 to 9.

    `int()` would also accept `_` and the digits of other scripts.
    """
    option: OptionInfo = typer.Option(help=meaning, parser=_parse_integer, metavar="INTEGER")
    return option


def split_words(
    words: Sequence[str],
    override: re.Pattern[str],
    violations: list[Violation],
) -> tuple[list[str], list[str]]:
    """Return files and overrides (the first group of a match); only one file is valid."""
    files = [word for word in words if not override.fullmatch(word)]
    for file in files[1:]:
        violations.append(
            Violation(
                "CONFIG", f"more than one file: {shortened(file)}", "Name one", code="many-files"
            )
        )
    return files, [match[1] for match in map(override.fullmatch, words) if match]


def read_config(words: Sequence[str], ranks: int) -> HybridConfig:
    """Return the checked configuration from the words of `CONFIG_ARGUMENT`.

    Args:
        words: at most one file, or directory of a model, and overrides KEY=VALUE.
        ranks: number of ranks.

    Raises:
        ConfigError: with every violation.
    """
    violations: list[Violation] = []
    files, overrides = split_words(words, OVERRIDE, violations)
    violations += _rank_violations(ranks)
    values: dict[str, Any] | None = None
    if files and Path(files[0]).is_dir():
        values = {"model": files.pop()}
    elif files:
        values = collect(violations, read_yaml, files[0], "CONFIG")
    values = values or {}
    violations += apply_overrides(values, overrides)
    values.pop("run", None)  # of `train`
    require_none(violations)
    directory = Path(files[0]).absolute().parent if files else None
    return check_config(values, ranks, directory)


def check_config(
    values: Mapping[str, Any],
    ranks: int,
    directory: Path | None,
    *,
    num_mtp_layers: int | None = None,
) -> HybridConfig:
    """Return the checked configuration of a mapping; see `read_config` and `load_config`.

    Raises ConfigError.
    """
    require_none(_rank_violations(ranks))
    try:
        return load_config(
            values,
            ranks,
            weights_only=True,
            own_weights=True,
            num_mtp_layers=num_mtp_layers,
            directory=directory,
        )
    except DependencyError as error:  # a model on the Hub, without huggingface_hub
        raise ConfigError.of(
            "model", str(error), "Or name a directory", code="needs-package"
        ) from error


def _rank_violations(ranks: int) -> Violations:
    if not 1 <= ranks <= MAX_RANKS:
        yield Violation("--ranks", f"{ranks} ranks", f"Use 1 to {MAX_RANKS}", code="out-of-range")


def _parse_integer(text: str) -> int:
    if not re.fullmatch("[0-9]{1,30}", str(text)):
        raise typer.BadParameter(f"{shortened(text)} is not a whole number")
    return int(text)


@contextmanager
def refusing(as_json: bool = False) -> Iterator[None]:
    """End the command with a message, as of `refuse`, if the block raises an error of the engine.

    The exit status is 2, or 3 if ranks or engines ended without a verdict.
    """
    try:
        yield
    except ConfigError as error:
        refuse(error.findings, as_json)
    except (DependencyError, FileError, ModelError, ReshardError) as error:
        status = 3 if isinstance(error, ReshardError) else 2
        end_without_answer(str(error), status, as_json, code=error.code)


def refuse(violations: Sequence[Violation], as_json: bool = False) -> NoReturn:
    """End the command with status 2 and every violation on stderr, and for `--json` on stdout."""
    message = f"Error: {violations[0]}"
    if len(violations) > 1:
        _, *lines = str(ConfigError(violations)).splitlines()
        message = "\n".join((f"{len(violations)} errors:", *lines))
    end_without_answer(message, 2, as_json, violations=[*map(asdict, violations)])
