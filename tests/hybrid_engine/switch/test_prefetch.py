"""Prefetch during a rollout and offload during a fill, with fakes of both engines."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch

from hybrid_engine.errors import OffloadError, ReshardError
from hybrid_engine.memory import arena
from hybrid_engine.switch.prefetch import Prefetcher, free_beside_vllm
from tests.hybrid_engine.switch.fakes import FORWARD, IDLE, INFER, NBYTES, TRAIN, TRAINING_NBYTES, Rig

MIB = 1024**2
COPIED = TRAINING_NBYTES["param"] + TRAINING_NBYTES["optimizer"]


@pytest.fixture(params=[False, True], ids=["plain", "elastic"])
def ahead(job: None, request: pytest.FixtureRequest) -> Rig:
    """A rig in a rollout, after one whole cycle."""
    return in_second_rollout(Rig(elastic=request.param, prefetch="auto"))


def in_second_rollout(rig: Rig) -> Rig:
    for state in (INFER, TRAIN, INFER):
        if rig.manager.state is TRAIN:
            rig.training.step()
        rig.manager.enter(state)
    return rig


# Onloading.


def test_prefetch_onloads_everything_but_gradients(ahead: Rig):
    ahead.manager.near_end()
    assert ahead.resident() == {"param", "optimizer"}
    report = ahead.enter(TRAIN)
    assert report.bytes_prefetched == COPIED
    assert report.bytes_onloaded == sum(TRAINING_NBYTES.values())
    assert ahead.comes_in_chunks or report.peak_bytes == COPIED + NBYTES, "inference weights included"
    assert f"prefetched {COPIED / 1e9:.6f} GB" in str(report)
    assert ahead.manager.enter(INFER).bytes_prefetched == 0


def test_the_first_rollout_prefetches_only_parameters(job: None):
    rig = Rig(prefetch="auto")
    rig.fill()
    rig.manager.near_end()
    assert rig.resident() == {"param"}
    rig.enter(FORWARD)


def test_prefetch_follows_the_state_after_the_last_rollout(ahead: Rig):
    ahead.manager.enter(FORWARD)
    ahead.manager.enter(TRAIN)
    ahead.manager.enter(INFER)
    ahead.manager.near_end()
    assert ahead.resident() == {"param"}
    ahead.manager.enter(IDLE)
    ahead.manager.enter(INFER)
    ahead.manager.near_end()
    ahead.assert_is(INFER)


@pytest.mark.parametrize(
    ("prefetch_mb", "expected"),
    [(1, set()), (2, {"param"}), (3, {"param", "a part of optimizer"}), (8, {"param", "optimizer"})],
)
def test_prefetch_stays_within_prefetch_mb(job: None, prefetch_mb: int, expected: set[str]):
    rig = in_second_rollout(Rig(prefetch="auto", prefetch_mb=prefetch_mb))
    for _ in range(2):  # `near_end` is called once per generate call of a rollout
        rig.manager.near_end()
        resident = {kind: sum(of.values()) for kind, of in rig.offloader.resident_nbytes().items()}
        came_back = {
            kind if resident[kind] == TRAINING_NBYTES[kind] else f"a part of {kind}"
            for kind in resident
            if resident[kind]
        }
        assert came_back == expected
        assert sum(resident.values()) <= prefetch_mb * MIB
    rig.enter(TRAIN)


@pytest.mark.parametrize(
    ("free", "utilization", "taken_before", "room"),
    [(50, 0.5, 0, 50), (50, 0.9, 0, 10), (90, 0.5, 0, 50), (0, 0.5, 0, 0), (50, 0.5, 20, 30), (50, 0.9, 20, -10)],
)
def test_vllm_share_of_the_gpu_is_reserved(free: int, utilization: float, taken_before: int, room: int):
    assert free_beside_vllm(free, 100, utilization, taken_before) == pytest.approx(room, abs=1)


def test_earlier_and_prefetched_memory_reduce_the_room(job: None, monkeypatch: pytest.MonkeyPatch):
    """A GPU of 10 MiB: vLLM may use half, and 2 MiB were in use before vLLM was built."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * MIB, 10 * MIB))
    rig = in_second_rollout(Rig(prefetch="auto", gpu_memory_utilization=0.5))
    prefetcher = Prefetcher(rig.offloader, rig.inference, rig.manager.config, torch.device("cuda"), 2 * MIB)
    prefetcher._highest_peak = 20 * MIB  # above the GPU's memory, so no limit
    assert prefetcher._room() == 3 * MIB
    prefetcher.bring(["param"])
    rig.offloader.wait()
    assert prefetcher._room() == 3 * MIB - TRAINING_NBYTES["param"]


@pytest.mark.parametrize("state", [TRAIN, FORWARD, IDLE])
def test_near_end_outside_a_rollout_does_nothing(rig: Rig, state: object):
    rig.manager.enter(INFER)
    rig.manager.enter(state)
    rig.manager.near_end()
    rig.assert_is(state)
    rig.manager.close()
    rig.manager.near_end()


@pytest.mark.parametrize("target", [FORWARD, IDLE])
def test_unused_prefetched_state_is_dropped_without_a_copy(ahead: Rig, target: object):
    ahead.manager.near_end()
    copied = ahead.offloader.copied_nbytes
    ahead.enter(target)
    assert ahead.offloader.copied_nbytes == copied
    ahead.enter(TRAIN)


# Offloading.


@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
def test_optimizer_state_is_offloaded_during_the_fill(job: None, gate: threading.Event, elastic: bool):
    rig = Rig(elastic=elastic, prefetch="auto")
    rig.training.step()
    resident: list[set[str]] = []
    allocate = rig.inference.allocate

    def allocate_and_open_gate(groups: list[str]) -> object:
        resident.append(rig.resident())
        gate.set()  # copies run only from here on
        return allocate(groups)

    rig.inference.allocate = allocate_and_open_gate
    report = rig.enter(INFER)
    assert resident[0] == {"param", "optimizer"}
    assert report.bytes_offloaded == sum(TRAINING_NBYTES.values())
    before = sum(TRAINING_NBYTES.values())
    assert rig.comes_in_chunks or report.peak_bytes == before, "no more than before the switch"
    rig.enter(TRAIN)


def test_optimizer_state_is_offloaded_before_its_memory_is_needed(job: None):
    rig = Rig(prefetch="auto", offload_train_grad=False)  # gradients occupy the memory of the fill
    rig.training.step()
    resident: list[set[str]] = []
    allocate = rig.inference.allocate
    rig.inference.allocate = lambda groups: resident.append(rig.resident()) or allocate(groups)
    assert rig.manager.enter(INFER).peak_bytes == sum(TRAINING_NBYTES.values())
    assert resident[0] == {"param", "grad"}


# Failures.


@pytest.mark.parametrize("error", [OffloadError("no memory"), RuntimeError("CUDA out of memory")])
def test_a_failed_prefetch_is_logged_and_completed_by_the_switch(
    ahead: Rig, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    begin_copy = arena.Copier.begin_copy
    # A copy, because an error keeps its frames, and pytest keeps parameters of a test alive.
    outcomes = [None, copy.copy(error)]

    def failing(self: arena.Copier, *arguments: object, **options: object) -> None:
        if outcomes and (outcome := outcomes.pop(0)) is not None:
            raise outcome
        begin_copy(self, *arguments, **options)

    monkeypatch.setattr(arena.Copier, "begin_copy", failing)
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        ahead.manager.near_end()
    assert "prefetch failed, the next switch brings the rest" in caplog.text
    assert ahead.manager.enter(TRAIN).bytes_prefetched == TRAINING_NBYTES["param"]
    ahead.assert_is(TRAIN)


def test_a_failed_switch_offloads_prefetched_state(ahead: Rig):
    ahead.manager.near_end()
    ahead.script.arm("release", OSError("busy"))
    with pytest.raises(ReshardError, match="busy"):
        ahead.manager.enter(TRAIN)
    ahead.assert_is(IDLE)
    ahead.enter(TRAIN)


# Set-up.
