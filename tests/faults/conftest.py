"""Fixture that appends results to the file $FAULTS_JSON, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """Return a function that appends its arguments, the figures of a case, to the file."""

    def add(**row: Any) -> None:
        # In one write after each case: a run may be aborted, and other processes append too.
        if path := os.environ.get("FAULTS_JSON"):
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")

    return add
