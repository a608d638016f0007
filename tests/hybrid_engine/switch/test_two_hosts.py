"""Two simulated hosts with two real ranks each: a failure on one host is rolled back on both."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from hybrid_engine.ranks import agreement, rank_tree
from hybrid_engine.ranks.failure_watch import FailureWatch
from tests.harness.launch import Ranks
from tests.hybrid_engine.switch.fakes import INFER, TRAIN, Rig

HOSTS = "aabb"
CALLS = ("prepare", "allocate first", "commit first", "allocate second", "commit second", "wake")


def fail_in_turn() -> tuple[dict[str, str], set[str]]:
    """Fail on the last rank in each of `CALLS`.

    Returns the errors of this rank by call, and the marks at which its failure watch arrived.
    """
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    errors: dict[str, str] = {}
    marks = set[str]()
    num_at = FailureWatch.num_at

    def record_mark(watch: FailureWatch, mark: str, *, arriving: bool = False) -> int | None:
        marks.update([mark] if arriving else [])
        return num_at(watch, mark, arriving=arriving)

    agreement.NUM_STEPS = 1  # set directly: this process serves only this test
    FailureWatch.num_at = record_mark
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)  # one group per host, one between hosts
        rig = Rig(host=HOSTS[rank], elastic=True)
    for call in CALLS:
        rig.training.step()
        if rank == 3:
            rig.script.arm(call, MemoryError("no memory on rank 3"))
        try:
            rig.manager.enter(INFER)
            errors[call] = ""
        except Exception as error:
            errors[call] = f"{type(error).__name__}: {error}"
        # Every rank has rolled back, and the job is still usable.
        rig.assert_is(TRAIN)
        for state in (INFER, TRAIN):
            rig.manager.enter(state)
            rig.assert_is(state)
    rig.close()
    dist.destroy_process_group()
    return errors, marks


def test_a_failure_on_one_host_is_undone_on_both(ranks: Ranks) -> None:
    by_rank = ranks.launch(fail_in_turn, 4, timeout=200)
    *other_ranks, failing_rank = [rank_errors for rank_errors, _ in by_rank]
    for call in CALLS:
        assert failing_rank[call].startswith("ReshardError: "), failing_rank[call]
        for errors in other_ranks:
            assert "no memory on rank 3" in errors[call], (call, errors[call])
    marks = [rank_marks for _, rank_marks in by_rank]
    assert marks[1] == marks[3] == set(), "only the first rank of a host meets the other host"
    assert marks[0] == marks[2]
    assert {"pace/0", "pace/1"} <= marks[0]
