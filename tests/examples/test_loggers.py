"""What TensorBoard and W&B are told of the rows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.gpt_rl.loggers import TensorBoard, WeightsAndBiases, import_wandb, scalars
from hybrid_engine.errors import DependencyError

ROW = {"iteration": 3, "accuracy": 0.5, "reward": None, "kl": 0.1, "unix_time": 1.8e9}


class WandbStandIn(SimpleNamespace):
    """In place of the package: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(inits=[], logged=[], is_finished=False)

    def init(self, **settings: Any) -> None:
        self.inits.append(settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


def test_tags_are_grouped() -> None:
    row = {**ROW, "generate_seconds": 2.0, "iteration_seconds": 5.0, "reshard_seconds": 0.5, "reshard_share": 0.1}
    assert dict(scalars(row)) == {
        "eval/accuracy": 0.5,
        "train/kl": 0.1,
        "time/generate": 2.0,
        "time/iteration": 5.0,
        "reshard/seconds": 0.5,
        "reshard/share": 0.1,
    }


def test_events_hold_the_rows(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for iterations in (range(3), range(2, 4)):  # the second start does iteration 2 again
        events = TensorBoard(tmp_path)
        for iteration in iterations:
            events.log({**ROW, "iteration": iteration})
        events.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("eval/accuracy")] == [0, 1, 2, 3]
    assert found.Tags()["scalars"] == ["eval/accuracy", "train/kl"]


def test_a_resumed_run_is_the_same_of_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = WandbStandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for is_resumed in (False, True, False):
        logger = WeightsAndBiases("sums", tmp_path, {"world_size": 2}, is_resumed=is_resumed)
    logger.log(ROW)
    logger.close()
    first, resumed, anew = (settings["id"] for settings in wandb.inits)
    assert first == resumed != anew
    assert wandb.inits[0]["project"] == "sums"
    assert wandb.inits[0]["config"] == {"world_size": 2}
    assert wandb.logged == [(3, {"eval/accuracy": 0.5, "train/kl": 0.1})]
    assert wandb.is_finished


def test_without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match="pip install wandb"):
        import_wandb()
