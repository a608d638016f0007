"""Four real ranks on two hosts, by their own account, with fakes of their engines: one fails, all raise and go on."""

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
    """The last rank fails; what every rank raised, by call, and the marks that it came to."""
    dist.init_process_group("gloo")
    rank, errors, marks = int(os.environ["RANK"]), {}, set[str]()
    num_at = FailureWatch.num_at

    def noted(watch: FailureWatch, mark: str, *, arriving: bool = False) -> int | None:
        marks.update([mark] if arriving else [])
        return num_at(watch, mark, arriving=arriving)

    agreement.NUM_STEPS = 1  # in a process of its own
    FailureWatch.num_at = noted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)
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
        rig.assert_is(TRAIN)
        for state in (INFER, TRAIN):
            rig.manager.enter(state)
            rig.assert_is(state)
    rig.close()
    dist.destroy_process_group()
    return errors, marks


def test_a_failure_on_one_host_is_undone_on_both(ranks: Ranks) -> None:
    by_rank = ranks.launch(fail_in_turn, 4, timeout=200)
    *others, own = [errors for errors, _ in by_rank]
    for call in CALLS:
        assert own[call].startswith("ReshardError: "), own[call]
        for of_rank in others:
            assert "no memory on rank 3" in of_rank[call], (call, of_rank[call])
    marks = [of_rank for _, of_rank in by_rank]
    assert marks[1] == marks[3] == set(), "the first of a host stands for it"
    assert marks[0] == marks[2]
    assert {"pace/0", "pace/1"} <= marks[0]
