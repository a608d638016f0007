"""These tests run when they are asked for by their marker: `pytest -m faults`. What they saw goes to $FAULTS_JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def record() -> Iterator[Callable[..., None]]:
    """Call with the figures of a case: a row of the table that is written at the end."""
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        if path := os.environ.get("FAULTS_JSON"):  # after each case: a run that is ended early leaves what it saw
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")

    yield add
