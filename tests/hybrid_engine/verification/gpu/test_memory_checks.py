"""Stage 1 over the model of the driver: green where all is right, red where something is broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory import device_peers
from hybrid_engine.memory.device_pages import DeviceMemory
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.verification.gpu import memory_checks, pull_figures
from hybrid_engine.verification.gpu.checks import Check, Colour, read_results, run_checks
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
    with pytest.raises(memory_checks.CannotCheckError, match=r"not permitted: allow it\. Without it .* send messages"):
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
