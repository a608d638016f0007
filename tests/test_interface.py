"""Names of the product that users refer to equal the recorded ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness.interface import RECORDED, interface


@pytest.fixture(scope="module")
def current() -> dict[str, Any]:
    return interface()


@pytest.mark.parametrize("part", ["exports", "keys", "commands", "report", "codes"])
def test_names_are_the_recorded_ones(part: str, current: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())[part]
    assert current[part] == recorded, "run: python -m tests.harness.interface --record"
