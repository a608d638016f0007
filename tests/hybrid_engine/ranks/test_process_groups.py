"""Groups end once the device has finished what they have under way, or does not."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.ranks import process_groups
from hybrid_engine.ranks.process_groups import end_groups


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a device that needs three looks to finish is asked, and groups that end."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            calls.append("query")
            return calls.count("query") > 2

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(process_groups, "is_alive", lambda group: group is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append("end"))
    return calls


def test_groups_end_when_the_device_has_finished(calls: list[str]) -> None:
    end_groups("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", None)
    assert calls == ["record", "query", "query", "query", "end", "end"]


def test_groups_on_the_cpu_wait_for_no_device(calls: list[str]) -> None:
    end_groups("cpu:gloo,cuda:gloo")
    assert calls == ["end"]


def test_a_device_that_never_finishes_is_not_waited_for(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)
    monkeypatch.setattr(process_groups, "_SECONDS_TO_FINISH", 0.05)
    started = time.monotonic()
    end_groups("cuda:nccl")
    assert 0.05 <= time.monotonic() - started < 5
    assert calls == ["record", "end"]


def test_a_device_that_has_failed_is_not_waited_for(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.Event, "query", failed)
    end_groups("cuda:nccl", "cpu:gloo")
    assert calls == ["record", "end", "end"]
