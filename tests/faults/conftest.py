"""These tests run when they are asked for by their marker: `pytest -m faults`. What they saw goes to $FAULTS_JSON,
one JSON object a line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """Call with the figures of a case: they become a line of the file."""

    def add(**row: Any) -> None:
        if path := os.environ.get("FAULTS_JSON"):  # after each case: a run that is ended early leaves what it saw
            with Path(path).open("a") as file:  # one write of one line: several processes may append
                file.write(json.dumps(row) + "\n")

    return add
