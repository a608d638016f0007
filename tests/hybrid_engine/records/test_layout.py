"""Records, buffers and layouts check themselves."""

from __future__ import annotations

import pytest

from hybrid_engine.errors import PlanError
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.planning.cases import whole


def test_ranks_that_disagree_are_all_named() -> None:
    one, other = whole("t", (4,), 0, "b"), whole("t", (5,), 0, "b")
    with pytest.raises(PlanError) as caught:
        Layout.merge([one, other])
    assert "t: shape (4,) on one rank, (5,) on another" in str(caught.value)
    assert "described twice" in str(caught.value)
    assert len(caught.value.findings) == 2


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_an_extent_is_an_interval(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="invalid interval"):
        Extent(start, stop)


def test_records_and_buffers_check_themselves() -> None:
    with pytest.raises(ValueError, match=r"my\.tensor: 1 strides for 2 dims"):
        Shard(Region("my.tensor", (0, 0), (2, 2)), Place(BufferId(0, "b"), 0, (1,)))
    with pytest.raises(ValueError, match="unknown dtype 'int3'; known are float64"):
        Buffer(4, "int3")
    with pytest.raises(ValueError, match="padding must not be empty"):
        Buffer(4, "int8", padding=(Extent(2, 2),))
