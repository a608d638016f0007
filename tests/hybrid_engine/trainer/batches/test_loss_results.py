"""Checks of the results of loss functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from tests.harness.errors import has_code


def log_probs() -> torch.Tensor:
    return torch.full((2, 3), -1.0, requires_grad=True)


ACCEPTED: dict[str, tuple[Any, dict[str, float]]] = {
    "scalar": (lambda _batch, log_probs: -log_probs.mean(), {"loss": 1.0}),
    "one element": (
        lambda _batch, log_probs: -log_probs.mean(dim=(0, 1), keepdim=True),
        {"loss": 1.0},
    ),
    "dict": (
        lambda _batch, log_probs: {"loss": -log_probs.mean(), "kl": 0.5},
        {"loss": 1.0, "kl": 0.5},
    ),
    "pair": (lambda _batch, log_probs: (-log_probs.mean(), {"tokens": 6}), {"tokens": 6.0}),
    "pair without report": (lambda _batch, log_probs: (-log_probs.mean(), {}), {}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_results_of_every_form_are_accepted(name: str) -> None:
    function, expected = ACCEPTED[name]
    checked = CheckedLoss(function)
    loss, report = checked({}, log_probs())
    assert checked.fault is None
    assert loss.shape == ()
    assert loss.item() == 1.0
    assert {key: value.item() for key, value in report.items()} == expected
    with torch.no_grad():
        loss /= 4  # as Megatron does
    assert {key: value.item() for key, value in report.items()} == expected


@pytest.fixture
def meet_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the next collectives include ranks with other losses."""

    def meet(*other_losses: CheckedLoss) -> None:
        contributions = []

        def record(values: torch.Tensor, **_: Any) -> None:
            contributions.append(values.clone())

        def all_reduce_maximum(values: torch.Tensor, **_: Any) -> None:
            values.copy_(torch.stack([values, *contributions]).amax(0))

        monkeypatch.setattr(dist, "all_reduce", record)
        for loss in other_losses:
            loss.finish(torch.device("cpu"))
        monkeypatch.setattr(dist, "all_reduce", all_reduce_maximum)

    return meet


def loss_reporting(*names: str) -> CheckedLoss:
    checked = CheckedLoss(lambda _batch, log_probs: (log_probs.mean(), dict.fromkeys(names, 1.0)))
    checked({}, log_probs())
    return checked


def test_all_ranks_report_the_same_names(meet_ranks: Callable[..., None]) -> None:
    """Order does not matter; a rank with an earlier fault is not compared and keeps its fault."""
    failed = CheckedLoss(lambda _batch, _log_probs: None)
    failed({}, log_probs())
    for other_losses, names in (
        ([loss_reporting("kl", "loss")], ""),
        ([loss_reporting("kl", "loss"), failed], ""),
        ([loss_reporting("kl")], "kl, loss"),
        ([loss_reporting()], "kl, loss"),
        ([failed, loss_reporting("kl", "entropy")], "kl, loss"),
    ):
        checked = loss_reporting("loss", "kl")
        meet_ranks(*other_losses)
        checked.finish(torch.device("cpu"))
        assert (checked.fault is None) == (not names)
        if checked.fault is not None:
            assert has_code("other-names-reported", names)(checked.fault)
    before = failed.fault
    failed.finish(torch.device("cpu"))
    assert failed.fault is before


@pytest.mark.parametrize(("number", "text"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_a_loss_that_is_not_finite_is_reported_at_the_end(
    number: float, text: str, meet_ranks: Callable[..., None]
) -> None:
    factors = iter([1.0, number, number])  # micro batch 1 is the first fault
    checked = CheckedLoss(lambda _batch, log_probs: log_probs.abs().mean() * next(factors))
    for _ in range(3):
        checked({}, log_probs())
    assert checked.fault is None
    meet_ranks(CheckedLoss(lambda _batch, log_probs: log_probs.mean()))
    checked.finish(torch.device("cpu"))
    assert has_code("loss-not-finite", text, "micro batch 1")(checked.fault)


def test_an_input_that_is_not_finite_is_reported_instead_of_the_loss(
    meet_ranks: Callable[..., None],
) -> None:
    checked = CheckedLoss(lambda _batch, log_probs: log_probs.mean())
    checked({}, log_probs() * float("nan"))
    meet_ranks(CheckedLoss(lambda _batch, log_probs: log_probs.mean()))
    checked.finish(torch.device("cpu"))
    assert has_code("loss-input-not-finite", "nan", "micro batch 0")(checked.fault)


def return_nothing(_batch: Any, log_probs: torch.Tensor) -> None:
    log_probs.mean()


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (return_nothing, "no-loss"),
    "vector": (lambda _b, log_probs: -log_probs.sum(1), "loss-not-a-scalar"),
    "number": (lambda _b, log_probs: 1.5, "no-loss"),
    "no number": (lambda _b, log_probs: "loss", "no-loss"),
    "integer": (lambda _b, log_probs: log_probs.long().sum(), "loss-not-a-scalar"),
    "number in a dict": (lambda _b, log_probs: {"loss": 1.5}, "loss-not-a-scalar"),
    "detached": (lambda _b, log_probs: -log_probs.detach().mean(), "loss-without-gradient"),
    "dict without": (lambda _b, log_probs: {"kl": 1.0}, "no-loss"),
    "triple": (lambda _b, log_probs: (log_probs.mean(), 3, {}), "no-loss"),
    "vector in the report": (
        lambda _b, log_probs: (log_probs.mean(), {"kl": log_probs.sum(1)}),
        "report-not-a-scalar",
    ),
    "text in the report": (
        lambda _b, log_probs: (log_probs.mean(), {"kl": "low"}),
        "report-not-a-scalar",
    ),
    "error": (lambda batch, _log_probs: batch["weights"], "loss-function-failed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_result_is_kept_as_the_fault(name: str) -> None:
    """The schedule continues with a loss of 0, which has a gradient."""
    function, code = REFUSED[name]
    checked = CheckedLoss(function)
    inputs = log_probs()
    loss, report = checked({"tokens": torch.zeros(2, 3)}, inputs)
    assert has_code(code)(checked.fault)
    assert report == {}
    loss.backward()
    assert not inputs.grad.any()


def test_a_failed_loss_is_not_called_again_and_keeps_its_cause() -> None:
    calls = []

    def loss(_batch: Any, log_probs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise ZeroDivisionError("no tokens")

    checked = CheckedLoss(loss)
    for _ in range(3):
        checked({}, log_probs())
    assert len(calls) == 1
    assert isinstance(checked.fault.__cause__, ZeroDivisionError)


def test_all_micro_batches_report_the_same_names() -> None:
    names = iter(["kl", "entropy"])
    checked = CheckedLoss(lambda _batch, log_probs: (log_probs.mean(), {next(names): 1.0}))
    for _ in range(2):
        checked({}, log_probs())
    assert has_code("other-names-reported", "entropy, kl")(checked.fault)


def test_any_loss_may_be_divided_in_place() -> None:
    """Autograd keeps the result of `sqrt` and would refuse a change to it."""
    values = log_probs()
    loss, _ = CheckedLoss(lambda _batch, log_probs: log_probs.pow(2).mean().sqrt())({}, values)
    loss /= 4  # as Megatron does
    loss.backward()
    assert values.grad.sum().item() == pytest.approx(-1 / 4)
