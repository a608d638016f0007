"""Fixtures that fail a test on the software GPU if its checker reports something.

For tests of other folders: `pytest -p tests.software_gpu.checks tests/...`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.software_gpu.device import Reports


@pytest.fixture(scope="session")
def reports() -> Reports:
    """Return the checker's reports; a test that reads them with `new` accepts them."""
    from tests.software_gpu.device import Reports

    return Reports()


@pytest.fixture(autouse=True)
def _require_no_reports(reports: Reports) -> Iterator[None]:
    yield
    reports.require_none()
