"""Updates of vLLM 0.24's workers. That version is not installed here, so the worker is a stand-in
of the same methods.

`SERVER_PYTHON=<python of an environment with 0.24> pytest
tests/hybrid_engine/serving/test_servers.py` runs real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.errors import StateError
from tests.harness.values import Values

pytestmark = pytest.mark.slow


class ReloadingWorker:
    """A worker whose own updates reload its layers, as vLLM 0.24's."""

    def __init__(self, engine: Any) -> None:
        self.weight_transfer_engine = engine
        self.vllm_config = None
        self._weight_update_active = False
        self.reloads: list[str] = []

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.reloads.append(f"start {is_checkpoint_format}")

    def update_weights(self, update_info: Values) -> None:
        self.reloads.append(f"update {update_info}")

    def finish_weight_update(self) -> None:
        self.reloads.append("finish")


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.v1.worker import gpu_worker

    from hybrid_engine.backends.vllm.server import replaced_methods

    monkeypatch.setattr(gpu_worker, "Worker", ReloadingWorker)
    replaced_methods.correct_workers()
    yield replaced_methods
    replaced_methods._patches.close()


class Receiver:
    """Fields of a receiver, without an engine: `calls` of the switch."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def parse_update_info(self, info: Values) -> Any:
        return SimpleNamespace(**info)

    def receive_weights(self, update: Any) -> None:
        self.calls.append(f"receive {update.version}")
        if update.version == "bad":
            raise ValueError("bad")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    from hybrid_engine.backends.vllm.server import receiver

    monkeypatch.setattr(receiver, "HybridEngineReceiver", Receiver)
    return Receiver()


def test_the_engine_updates_in_order_and_no_layer_is_reloaded(
    receiver: Receiver, older: Any
) -> None:
    worker = ReloadingWorker(receiver)
    for version in ("3", "bad"):
        with pytest.raises(StateError, match="no update of the weights was started"):
            worker.update_weights({"version": version})
        worker.start_weight_update()
        with pytest.raises(StateError, match="is active"):
            worker.start_weight_update()
        with pytest.raises(ValueError, match="bad") if version == "bad" else nullcontext():
            worker.update_weights({"version": version})
        if version != "bad":
            worker.finish_weight_update()
    with pytest.raises(StateError, match="no update of the weights was started"):
        worker.finish_weight_update()
    assert receiver.calls == ["receive 3", "finish", "receive bad"]
    assert worker.reloads == []


def test_other_engines_keep_their_reload(receiver: Receiver, older: Any) -> None:
    worker = ReloadingWorker(object())
    worker.start_weight_update()
    worker.update_weights({"a": 1})
    worker.finish_weight_update()
    assert worker.reloads == ["start True", "update {'a': 1}", "finish"]
