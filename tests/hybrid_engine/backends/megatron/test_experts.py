"""Megatron with experts, latent attention, multi-token prediction and uneven pipelines, against transformers.

Everything that can be spread over ranks is compared with one transformers model: logits, losses and gradient norms of
training steps, and every weight after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.launch import Call, Outcomes, Ranks
from tests.hybrid_engine.backends.megatron.expert_cases import (
    ADAM_EPS,
    CASES,
    WEIGHT_DECAY,
    Case,
    close,
    make_batch,
    reference_model,
    save_models,
)
from tests.zoo import padded_batches
from tests.zoo.megatron_models import load_canonical, negative_log_likelihood, running, whole_weights
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import read_canonical, train_hf_model

# fp32: sums in another order only. Logits reach about 4, losses 5.
ATOL = 2e-5
NUM_STEPS = 2


@dataclass(frozen=True)
class Offload:
    """What the offloader would take, against Megatron's own buffers.

    Attributes:
        missing: weights that it would leave, or whose gradients.
        not_exported: buffers that other ranks could not read.
    """

    missing: list[str]
    not_exported: list[str]
    owners: list[str]
    num_expert_buffers: int


@dataclass(frozen=True)
class Trained:
    """What one rank computed before, in and after training.

    Attributes:
        logits, log_probs: of the whole batch, before and after.
        reports: by step.
        weights: afterwards, of all ranks, by name in the checkpoint; on rank 0.
    """

    logits: torch.Tensor
    reports: list[dict[str, float]]
    log_probs: torch.Tensor
    weights: dict[str, torch.Tensor]
    offload: Offload


def train(case: Case, path: Path) -> Trained:
    """On every rank, without what transformers has not: a bias that moves, a loss for multi-token prediction."""
    with running(path, case.config()) as run:
        load_canonical(run, path)
        engine, batch, settings = run.engine, share_of(run.engine, make_batch()), run.actor.transformer_config
        settings.moe_router_bias_update_rate = settings.mtp_loss_scaling_factor = 0.0
        logits = engine.gather_over_data_parallel(engine.logits(batch["tokens"]))
        reports = [engine.train_step(batch, negative_log_likelihood) for _ in range(NUM_STEPS)]
        log_probs = engine.gather_over_data_parallel(engine.log_probs(batch))
        engine.weights.prepare()
        weights = whole_weights(engine.weights)
        return Trained(
            logits, reports, log_probs, weights if torch.distributed.get_rank() == 0 else {}, describe_offload(run)
        )


PADDED = ("mixtral ep2, overlap", "deepseek_v2 tp2", "deepseek_v3 pp2, first 1")
"""Those of two ranks that are read with padding on either side and packed, too."""


def read_padded(case: Case, path: Path) -> dict[str, padded_batches.Read]:
    with running(path, case.config()) as run:
        load_canonical(run, path)
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        return padded_batches.read_all(run.engine)


def describe_offload(run: Any) -> Offload:
    items, weights = run.engine.offload_items(), run.engine.weights
    held = {item.tensor.untyped_storage().data_ptr() for item in items if item.kind != "optimizer"}
    missing = [
        name
        for name, tensor in weights.model.named_weights()
        if tensor.untyped_storage().data_ptr() not in held
        or (isinstance(tensor, torch.nn.Parameter) and tensor.main_grad.untyped_storage().data_ptr() not in held)
    ]
    return Offload(
        missing=missing,
        not_exported=[str(name) for name, buffer in weights.layout().buffers.items() if not buffer.exported],
        owners=[item.owner for item in items],
        num_expert_buffers=sum("expert" in name for name in weights.buffers() if name.startswith("chunk")),
    )


@dataclass(frozen=True)
class Reference:
    """The same with transformers and torch's Adam; `initial`: the checkpoint's tensors."""

    logits: torch.Tensor
    losses: list[float]
    norms: list[float]
    log_probs: torch.Tensor
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Compared:
    """A case, what its ranks computed, and what transformers did."""

    case: Case
    ranks: list[Trained]
    expected: Reference


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], Outcomes]:
    """Number of ranks -> what its cases brought back; each number is launched once."""

    def launch_on(num_ranks: int) -> Outcomes:
        cases = CASES[num_ranks]
        calls: dict[str, Call] = {name: (train, (case, paths[case.model])) for name, case in cases.items()}
        for name in PADDED:
            if name in cases:
                calls[f"{name}, padded"] = read_padded, (cases[name], paths[cases[name].model])
        return engines.launch_in_turn(num_ranks, calls, timeout=600)

    return functools.cache(launch_on)


@pytest.fixture(scope="module")
def references(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """By name of the model."""

    def computed(name: str) -> Reference:
        model, batch = reference_model(name), make_batch()
        with torch.no_grad():
            logits = model(batch["tokens"]).logits
        losses, norms, log_probs = train_hf_model(model, batch, NUM_STEPS, weight_decay=WEIGHT_DECAY, eps=ADAM_EPS)
        model.save_pretrained(trained := tmp_path_factory.mktemp("trained"))
        return Reference(logits, losses, norms, log_probs, read_canonical(trained), read_canonical(paths[name]))

    return functools.cache(computed)


@pytest.fixture(
    params=[pytest.param((num_ranks, name), id=name) for num_ranks, cases in CASES.items() for name in cases]
)
def compared(
    request: pytest.FixtureRequest, launched: Callable[[int], Outcomes], references: Callable[[str], Reference]
) -> Compared:
    num_ranks, name = request.param
    case = CASES[num_ranks][name]
    return Compared(case, launched(num_ranks)[name], references(case.model))


def test_logits_are_those_of_transformers(compared: Compared) -> None:
    assert compared.expected.logits.abs().max() > 1, "logits this small show little"
    for rank, found in enumerate(compared.ranks):
        close(found.logits, compared.expected.logits, f"rank {rank}", ATOL)


def test_training_follows_transformers(compared: Compared) -> None:
    for found in compared.ranks:
        assert [report["loss"] for report in found.reports] == pytest.approx(compared.expected.losses, abs=1e-4)
        assert [report["grad_norm"] for report in found.reports] == pytest.approx(compared.expected.norms, rel=1e-3)
        close(found.log_probs, compared.expected.log_probs, "log-probabilities", ATOL)


def test_trained_weights_are_those_of_transformers(compared: Compared) -> None:
    """All of them; those of experts that no token chose stay, and so do biases."""
    found, expected = compared.ranks[0].weights, compared.expected
    assert found.keys() == expected.initial.keys()
    for tensor, values in expected.weights.items():
        close(found[tensor], values, tensor, ATOL)
        is_bias = tensor.endswith("e_score_correction_bias")
        assert torch.equal(values, expected.initial[tensor]) == is_bias, f"{tensor} shows nothing"


@pytest.mark.parametrize("name", [name for name in PADDED if name in CASES[2]])
def test_padding_and_packing_do_not_change_what_a_token_gets(launched: Callable[[int], Outcomes], name: str) -> None:
    """Nor what is learnt; with latent attention too."""
    for found in launched(2)[f"{name}, padded"]:
        padded_batches.assert_all_ways_agree(found, ATOL)
        padded_batches.assert_is_that_of_logits(found["right"], reference_model(CASES[2][name].model))


def test_everything_on_a_rank_is_offloaded(compared: Compared) -> None:
    for found in compared.ranks:
        assert found.offload.missing == []
        assert len(found.offload.owners) == len(set(found.offload.owners))


def test_every_buffer_is_exported(compared: Compared) -> None:
    assert [found.offload.not_exported for found in compared.ranks] == [[]] * len(compared.ranks)


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        (num_ranks, name)
        for num_ranks, cases in CASES.items()
        for name, case in cases.items()
        if case.actor.get("expert_model_parallel_size", 1) > 1 and case.actor.get("use_distributed_optimizer", True)
    ],
)
def test_experts_have_buffers_of_their_own(launched: Callable[[int], Outcomes], num_ranks: int, name: str) -> None:
    assert all(found.offload.num_expert_buffers >= 1 for found in launched(num_ranks)[name])
