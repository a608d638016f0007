"""Collectives get tensors on the job's device, as NCCL requires, even if shares are on the CPU.

Ranks of one process without a model, with collectives that only record devices. "meta" stands for
the GPU.
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

from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.tools.verify.comparison import Comparison
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.data_parallel import DataParallelRanks
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine

DEVICE = torch.device("meta")


class Sent(Exception):
    """Carries the devices of the tensors that a collective got."""


@pytest.fixture(autouse=True)
def _collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_devices(*tensors: torch.Tensor | list[torch.Tensor], **_: object) -> None:
        flat: list[torch.Tensor] = []
        for argument in tensors:
            flat += argument if isinstance(argument, list) else [argument]
        raise Sent({tensor.device for tensor in flat})

    for name in ("all_gather", "all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, record_devices)


def job() -> SimpleNamespace:
    agreement = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    return SimpleNamespace(device=DEVICE, agreement=agreement)


def test_counts_of_frozen_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_engine.trainer.megatron import build

    monkeypatch.setattr(build, "model_device", lambda: DEVICE)
    monkeypatch.setattr(
        build, "ModelTensors", lambda *_: SimpleNamespace(named_parameters=TensorDict)
    )
    expect_sent(lambda: build._freeze([], None, ["embedding.*"], ()))


def test_shares_and_reports() -> None:
    ranks = DataParallelRanks(0, 2, DEVICE)
    engine: Any = SimpleNamespace(data_parallel=ranks, _device=DEVICE)
    expect_sent(lambda: ranks.gather(torch.ones(3)))
    expect_sent(lambda: FsdpTrainEngine._average(engine, [{"loss": torch.ones(())}]))


def test_names_of_reported_losses() -> None:
    expect_sent(lambda: CheckedLoss(lambda _batch, values: values.mean()).finish(DEVICE))


def test_logits_that_transformers_computed() -> None:
    comparison: Any = SimpleNamespace(
        rank=1,
        worker=SimpleNamespace(job=job()),
        table=SimpleNamespace(dims=SimpleNamespace(vocab_size=8)),
        verdict=None,
        _tokens=lambda: torch.zeros(2, 3, dtype=torch.int64),
    )
    expect_sent(lambda: Comparison._expected_logits(comparison, Path("unread")))


def expect_sent(send: Callable[[], object]) -> None:
    with pytest.raises(Sent) as sent:
        send()
    assert sent.value.args == ({DEVICE},)
