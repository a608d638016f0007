"""What ranks send lies on the job's device: NCCL takes nothing else, and shares or counts may be on the CPU.

On ranks of one process that hold no model, with collectives that only look. "meta" stands for the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.tools.verify.comparison import Comparison
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
from hybrid_engine.trainer.trained_model import TrainedModel

DEVICE = torch.device("meta")


class Sent(Exception):
    """From which devices."""


@pytest.fixture(autouse=True)
def _collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*tensors: torch.Tensor | list[torch.Tensor], **_: object) -> None:
        raise Sent({one.device for each in tensors for one in (each if isinstance(each, list) else [each])})

    for name in ("all_gather", "all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, look)


def job() -> SimpleNamespace:
    agreement = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    return SimpleNamespace(device=DEVICE, agreement=agreement)


def test_how_many_parameters_a_pattern_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_engine.trainer.megatron import build

    monkeypatch.setattr(build, "model_device", lambda: DEVICE)
    monkeypatch.setattr(build, "ModelTensors", lambda *_: SimpleNamespace(named_parameters=dict[str, torch.Tensor]))
    expect_sent(lambda: build._freeze([], None, ["embedding.*"], ()))


def test_shares_and_reports() -> None:
    engine: Any = SimpleNamespace(dp_size=2, _device=DEVICE, _data_parallel=None)
    expect_sent(lambda: TrainedModel.gather_over_data_parallel(engine, torch.ones(3)))
    expect_sent(lambda: FsdpTrainEngine._average(engine, [{"loss": torch.ones(())}]))


def test_names_of_what_losses_report() -> None:
    expect_sent(lambda: CheckedLoss(lambda _batch, values: values.mean()).finish(DEVICE))


def test_logits_that_transformers_computed_for_all() -> None:
    comparison: Any = SimpleNamespace(
        rank=1,
        worker=SimpleNamespace(job=job()),
        table=SimpleNamespace(dims=SimpleNamespace(vocab_size=8)),
        _tokens=lambda: torch.zeros(2, 3, dtype=torch.int64),
    )
    expect_sent(lambda: Comparison._expected_logits(comparison, Path("unread")))


def expect_sent(send: Callable[[], object]) -> None:
    with pytest.raises(Sent) as sent:
        send()
    assert sent.value.args == ({DEVICE},)
