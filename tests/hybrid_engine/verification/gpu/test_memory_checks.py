"""Stage 1 over the model of the driver: green where all is right, red where something is broken on purpose."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory import device_peers
from hybrid_engine.memory.device_pages import DeviceMemory
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.verification.gpu import memory_checks, pull_figures
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Colour, judged, read_results, run_checks
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.memory_checks import MemoryChecks, beside_floor
from hybrid_engine.verification.gpu.pull_figures import PullTask
from hybrid_engine.verification.gpu.targets import SIMULATED, Target, target_named
from hybrid_engine.verification.gpu.timings import timing

STARTS_PROCESSES = ("pulling",)


@pytest.fixture
def target() -> Iterator[Target]:
    with target_named(SIMULATED) as target:
        yield target


def checks_of(target: Target, path: Path) -> dict[str, Check]:
    planned = [each for each in MemoryChecks(SIMULATED, target).planned() if each.name not in STARTS_PROCESSES]
    run_checks(planned, path)
    return {check.name: check for check in read_results(path, "")}


def test_all_is_green_over_the_model_of_the_driver(target: Target, tmp_path: Path) -> None:
    found = checks_of(target, tmp_path / "results")
    left_out = {"forked child": "the model of the driver counts what its own process keeps"}
    assert {check.name: check.note for check in found.values() if check.colour is not Colour.GREEN} == left_out
    assert found["buffer: release and restore"].values["nbytes"] == 5 * 2**16
    assert found["training, most at once"].values["nbytes"] >= found["training, most at once"].values["beside_nbytes"]
    assert target.taken_nbytes() == 0


def test_memory_that_does_not_go_is_red(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "release", lambda self, first, last: None)
    found = checks_of(target, tmp_path / "results")
    buffer = found["buffer: release and restore"]
    assert buffer.colour is Colour.RED
    assert buffer.note.startswith("0 bytes were freed, not 327680; ")
    assert found["offloading"].note == "needs buffer: see above"


def test_times_and_peaks_beyond_their_limits_stop_nothing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow driver, and a driver that counts more than there is."""
    monkeypatch.setattr(memory_checks, "_OVERHEAD", 0.5)
    monkeypatch.setattr(memory_checks, "_MOST_MAPPING_SECONDS", 0.0)
    monkeypatch.setattr(
        MemoryChecks, "_timed", lambda self, name, is_good, *texts, **values: judged(name, is_good, *texts)
    )
    found = checks_of(target, tmp_path / "results")
    red = {check.name for check in found.values() if check.colour is Colour.RED}
    assert red == {"taking memory", "giving memory back", "training, most at once"}
    assert Colour.MISSING not in {check.colour for check in found.values()}


@pytest.mark.parametrize(
    ("on_device", "on_host", "says"),
    [
        (80, 80, ""),
        (17, 28, ""),
        (12, 80, "12.0 GiB are free on cuda:0, and 16.1 are needed: end what else runs there (process 7 has 60 GiB)"),
        (80, 20, "20 GiB of host memory are available, and 27 are needed"),
    ],
)
def test_the_model_is_as_large_as_there_is_memory(
    on_device: int, on_host: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda is replaced."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (on_device * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(memory_checks, "memory_users", lambda: {"GPU-1": ("process 7 has 60 GiB",)})
    monkeypatch.setattr(memory_checks, "available_host_nbytes", lambda: on_host * GIB)
    device = torch.device("cuda", 0)
    checks = MemoryChecks("cuda:0", Target(device, device, None, int))
    if says:
        with pytest.raises(CannotCheckError, match=re.escape(says)):
            checks._shape()
    else:
        assert checks._shape().num_layers == (2 if on_device > 24 else 1)


def test_where_processes_cannot_be_opened_the_second_mapping_is_missing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    mapped = checks_of(target, tmp_path / "results")["second mapping"]
    assert mapped.colour is Colour.MISSING
    assert "cannot be opened" in mapped.note


def test_contents_that_change_are_red(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onload = Offloader.onload

    def forgetful(self: Offloader, *args: object, **kwargs: object) -> object:
        report = onload(self, *args, **kwargs)
        next(iter(self._inventory())).tensor.zero_()
        return report

    monkeypatch.setattr(Offloader, "onload", forgetful)
    offloading = checks_of(target, tmp_path / "results")["offloading"]
    assert offloading.colour is Colour.RED
    assert "an offload and onload changed the contents" in offloading.note


def test_a_forbidden_mapping_is_missing_and_all_other_figures_are_there(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_peers, "_pidfd_getfd", lambda pidfd, descriptor: (-1, 1))
    found = checks_of(target, tmp_path / "results")
    mapped = found.pop("second mapping")
    assert mapped.colour is Colour.MISSING
    assert "--cap-add SYS_PTRACE" in mapped.note
    assert {check.colour for check in found.values()} == {Colour.GREEN, Colour.LEFT_OUT}
    assert {"offload", "reshard", "release behind a kernel"} < set(found)


def test_pulls_that_are_forbidden_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(task: PullTask) -> Iterator[object]:
        raise TransportError("not permitted: allow it")

    monkeypatch.setattr(pull_figures, "pull_figures", forbidden)
    task = PullTask((SIMULATED, SIMULATED), memory_checks.TINY, 2**15, 1)
    with pytest.raises(CannotCheckError, match=r"not permitted: allow it\. Without it .* send messages"):
        list(memory_checks.pull_checks(task, is_judged=True))


@pytest.mark.parametrize(
    ("seconds", "is_judged", "colour"), [(4.0, True, Colour.GREEN), (6.0, True, Colour.RED), (6.0, False, Colour.GREEN)]
)
def test_times_are_judged_beside_their_floor(seconds: float, is_judged: bool, colour: Colour) -> None:
    check = beside_floor(timing("offload", 10**9, seconds, "plain copy", 1.0), 0.2, is_judged=is_judged)
    assert check.colour is colour
    assert check.values == {"nbytes": 10**9, "seconds": seconds, "floor_seconds": 1.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    with target_named("cuda:0") as target:
        found = checks_of(target, tmp_path / "results")
    assert {check.name: check.note for check in found.values() if check.colour is not Colour.GREEN} == {}
