"""Ranks that do not start: who is missing is said by those that did."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import LostRankError
from hybrid_engine.ranks.agreement import SECONDS_TO_BUILD
from hybrid_engine.ranks.start_up import _meet, default_backend, join_process_group, own_device


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    store.set("started/2", "")
    with pytest.raises(LostRankError, match=r"rank 1, 3 of 4 did not start within 0\.2 s"):
        _meet(store, 0, 4, 0.2)
    for rank in (1, 3):
        store.set(f"started/{rank}", "")
    _meet(store, 0, 4, 0.2)


def test_importing_may_take_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the others' start is bounded by a floor of its own, and so is that for their store."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    asked: list[float] = []

    def rendezvous(url: str, timeout: object) -> object:
        asked.append(timeout.total_seconds())
        yield dist.HashStore(), 0, 1

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    assert join_process_group(timeout_seconds=5.0)
    dist.destroy_process_group()
    assert asked == [SECONDS_TO_BUILD]


@pytest.mark.parametrize(
    ("num_visible", "current", "local_rank", "expected"),
    [
        pytest.param(8, 0, "3", 3, id="torchrun"),
        pytest.param(1, 0, "3", 0, id="a process sees its own GPU only"),
        pytest.param(8, 5, "3", 5, id="chosen by the caller"),
        pytest.param(8, 0, None, 0, id="one process"),
    ],
)
def test_each_rank_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, current: int, local_rank: str | None, expected: int
) -> None:
    """torch.cuda is replaced: no GPU is needed to choose one."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert own_device() == torch.device("cuda", expected)
    assert taken == [expected]


@pytest.mark.parametrize(("has_gpus", "expected"), [(True, "nccl"), (False, "gloo")])
def test_on_gpus_no_group_has_gloo_beside_nccl(monkeypatch: pytest.MonkeyPatch, has_gpus: bool, expected: str) -> None:
    """Megatron's groups take the backends of the default one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    assert default_backend() == expected
