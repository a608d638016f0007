"""Switches of several ranks in one process, each of which is the late one in turn."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.ranks.world import World
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.switch.fakes import INFER, TRAIN, Rig

HOSTS = "aabb"
THREE = dict.fromkeys(("first", "second", "third"), (512, 512))  # a bucket each


def schedules(num_ranks: int) -> pytest.MarkDecorator:
    """Parametrize a test by `late` and `early`; see `RankThreads`."""
    pairs = [(late, early) for late in range(num_ranks) for early in (False, True)]
    return pytest.mark.parametrize(("late", "early"), pairs)


@schedules(len(HOSTS))
def test_relays_carry_the_buckets_on_both_sides_of_a_skipped_one(late: int, early: bool) -> None:
    def switch_thrice(world: World) -> int:
        settings = {"incremental": "auto", "incremental_mb": 1, "shapes": THREE}
        rig = Rig(build=False, elastic=True, host=HOSTS[world.rank], **settings)
        rig.training.frozen = ("second",)
        rig.build()
        for _ in range(3):
            report = rig.fill()
            rig.assert_is(INFER)
            rig.manager.enter(TRAIN)
        rig.close()
        return report.bytes_skipped

    assert all(RankThreads(len(HOSTS), late, early=early).run(switch_thrice))


@schedules(2)
def test_no_delta_follows_a_failed_switch(late: int, early: bool) -> None:
    def switch(world: World) -> list[int]:
        rig = Rig(elastic=True, transport="collective", incremental="delta", incremental_mb=0)
        num_deltas = []
        for fails in (False, False, True, False, False):
            rig.train()
            if fails and world.rank == 0:
                rig.script.arm("commit second", MemoryError("no memory"))
            with pytest.raises(HybridEngineError) if fails else nullcontext():
                num_deltas.append(rig.manager.enter(INFER).messages_delta)
                rig.assert_is(INFER)
        rig.close()
        return num_deltas

    for first, second, after, last in RankThreads(2, late, early=early).run(switch):
        assert (first, bool(second), after, bool(last)) == (0, True, 0, True)
