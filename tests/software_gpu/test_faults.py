"""If NCCL fails or a rank dies in a switch, the state is right and no rank hangs."""

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
    """Open a store: the first one leaves a pipe of torch, which must not count as a leftover."""
    store_at("127.0.0.1")


@pytest.fixture
def run(tmp_path: Path, reports: Reports) -> Run:
    """Return a function that runs a fault and checks that all device memory is free after it."""

    def run(name: str) -> list[Outcome | None]:
        before = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        outcomes, output = on_ranks.outcomes(tmp_path, name)
        assert before == [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        assert "terminate called" not in output, "torch's watchdog ended a rank"
        reports.require_none()
        return outcomes

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
    """Both ranks raise in time, return to training, and refuse later switches at once."""
    for outcome, reason in zip(run(name), (error, "nothing for|the connection failed"), strict=True):
        assert outcome is not None
        assert outcome.errors["switch"].startswith("TransportError: collective transport, bucket")
        assert re.search(reason, outcome.errors["switch"])
        assert outcome.seconds["switch"] < TIMEOUT_SECONDS + SLACK_SECONDS
        assert (outcome.state, outcome.is_intact, outcome.errors["train"]) == ("train", True, "")
        assert "cannot be exchanged after an earlier failure" in outcome.errors["again"]
        assert outcome.seconds["again"] < TIMEOUT_SECONDS, "a rank waited for messages"
        assert (outcome.errors["close"], outcome.errors["end"], outcome.left) == ("", "", {})


def test_the_first_collective_fails_on_one_rank(run: Run) -> None:
    """The other rank waits in it on its device; both end."""
    first, second = run("the first collective fails")
    for outcome, kind in ((first, "ReshardError"), (second, "RemoteError")):
        assert outcome is not None
        assert outcome.errors["start"].startswith(f"{kind}: connecting GPUs")
        assert "ncclAllReduce fails as a test asked" in outcome.errors["start"]
        assert (outcome.errors["end"], outcome.left) == ("", {})


@pytest.mark.parametrize("name", ["a rank dies in a bucket", "a rank dies before an import"])
def test_a_dead_rank_is_reported(run: Run, name: str) -> None:
    """Even between the export of its memory and the import by the other rank."""
    dead, outcome = run(name)
    assert dead is None
    assert outcome is not None
    assert outcome.errors["switch"].startswith("LostRankError")
    assert "rank 0 has ended" in outcome.errors["switch"]
    assert outcome.errors["again"].startswith("StateError: the ranks have parted")
    assert (outcome.errors["close"], outcome.errors["end"], outcome.left) == ("", "", {})
