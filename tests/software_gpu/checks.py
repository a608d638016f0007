"""Every test over the software GPU fails where its checker reports something.

Those of other folders, too: `pytest -p tests.software_gpu.checks tests/...`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.software_gpu.device import Reports


@pytest.fixture(scope="session")
def reports() -> Reports:
    """What the checker has reported; a test that reads it with `new` accepts it."""
    from tests.software_gpu.device import Reports

    return Reports()


@pytest.fixture(autouse=True)
def _nothing_is_reported(reports: Reports) -> Iterator[None]:
    yield
    reports.require_none()
