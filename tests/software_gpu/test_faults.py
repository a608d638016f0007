"""NCCL fails, or a rank dies, in a switch of two ranks: the state is right, nobody hangs, and nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_engine.ranks.world import store_at
from tests.software_gpu import faults_on_ranks as on_ranks
from tests.software_gpu.device import Reports
from tests.software_gpu.faults_on_ranks import TIMEOUT_SECONDS, Outcome

pytestmark = [pytest.mark.engines, pytest.mark.ranks, pytest.mark.slow]

Run = Callable[[str], list[Outcome | None]]
SLACK_SECONDS = 10.0


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Open a store as launches do: the first of a process leaves a pipe of torch's, before anything is counted."""
    store_at("127.0.0.1")


@pytest.fixture
def run(tmp_path: Path, reports: Reports) -> Run:
    """Runs a fault of `faults_on_ranks`. What all processes had of the devices is free again afterwards."""

    def run(name: str) -> list[Outcome | None]:
        before = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        both, output = on_ranks.outcomes(tmp_path, name)
        assert before == [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        assert "terminate called" not in output, "torch's watchdog ended a rank"
        reports.require_none()
        return both

    return run


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a send fails", "ncclSend fails as a test asked"),
        ("a send fails, the other rank is late", "ncclSend fails as a test asked"),
        ("a later receive fails", "ncclRecv fails as a test asked"),
        ("messages fail as they begin", "ncclGroupEnd fails as a test asked"),
        ("messages fail on their way", "ncclRemoteError"),
        ("a communicator is aborted", "communicator was aborted"),
    ],
)
def test_messages_of_a_bucket_fail_on_one_rank(run: Run, name: str, error: str) -> None:
    """Both raise in time, are back in training and can train; later switches are refused at once."""
    for outcome, why in zip(run(name), (error, "nothing for|the connection failed"), strict=True):
        assert outcome is not None
        assert outcome.errors["switch"].startswith("TransportError: collective transport, bucket")
        assert re.search(why, outcome.errors["switch"])
        assert outcome.seconds["switch"] < TIMEOUT_SECONDS + SLACK_SECONDS
        assert (outcome.state, outcome.is_intact, outcome.errors["train"]) == ("train", True, "")
        assert "cannot be exchanged after an earlier failure" in outcome.errors["again"]
        assert outcome.seconds["again"] < TIMEOUT_SECONDS, "nobody waits for messages again"
        assert (outcome.errors["close"], outcome.errors["end"], outcome.left) == ("", "", {})


def test_the_first_collective_fails_on_one_rank(run: Run) -> None:
    """The other is in it on its device; both end."""
    first, second = run("the first collective fails")
    for outcome, kind in ((first, "ReshardError"), (second, "RemoteError")):
        assert outcome is not None
        assert outcome.errors["start"].startswith(f"{kind}: connecting GPUs")
        assert "ncclAllReduce fails as a test asked" in outcome.errors["start"]
        assert (outcome.errors["end"], outcome.left) == ("", {})


@pytest.mark.parametrize("name", ["a rank dies in a bucket", "a rank dies before an import"])
def test_a_rank_dies(run: Run, name: str) -> None:
    """Also between the export of its memory and the other's import: that one ends, and says who died."""
    dead, outcome = run(name)
    assert dead is None
    assert outcome is not None
    assert outcome.errors["switch"].startswith("LostRankError")
    assert "rank 0 has ended" in outcome.errors["switch"]
    assert outcome.errors["again"].startswith("StateError: the ranks have parted")
    assert (outcome.errors["close"], outcome.errors["end"], outcome.left) == ("", "", {})
