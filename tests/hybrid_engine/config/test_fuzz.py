"""A few random configurations and model configs; `python -m tests.hybrid_engine.config.fuzz` tries more."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.hybrid_engine.config import fuzz


@pytest.mark.timeout(300)
def test_each_is_refused_or_planned_in_a_short_time() -> None:
    tally = fuzz.run(settings.default.max_examples)
    assert tally.slow == []
    assert all(tally.counts[f"{name}: {end}"] for name in ("plan", "verify") for end in ("accepted", "refused"))
