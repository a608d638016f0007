"""Fixtures of the tests of the switch."""

from __future__ import annotations

import pytest

from tests.hybrid_engine.switch.fakes import Rig


@pytest.fixture
def rig(job: None) -> Rig:
    return Rig()
