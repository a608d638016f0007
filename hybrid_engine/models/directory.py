"""The name table of a model directory; only its config.json is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, UnknownModelError, Violation, clipped
from hybrid_engine.files.documents import read_json
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable


def read_model(directory: Path, key: str = "model") -> tuple[ModelTable, dict[str, Any]]:
    """Return the table and the contents of config.json. Raises ConfigError under `key` without config.json or table."""
    path = directory / "config.json"
    config = read_json(path, key, "Name a Hugging Face model directory")
    try:
        return table_for(config), config
    except UnknownModelError as error:
        found = Violation(key, clipped(str(error), 2000), "Choose a supported model or add a table")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        problem = f"{path} cannot be used: {clipped(repr(error))}"
        found = Violation(key, problem, "Name a directory with a complete config.json")
    raise ConfigError([found])
