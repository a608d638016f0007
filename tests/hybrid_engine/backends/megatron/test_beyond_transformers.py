"""What transformers' training has not: a router's bias that moves by counts, and a loss for multi-token prediction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import BatchError
from tests.harness.core_versions import INSTALLED
from tests.harness.launch import Call, Outcomes, Ranks
from tests.hybrid_engine.backends.megatron.expert_cases import (
    BATCH,
    CASES,
    EP2,
    TP2,
    Case,
    close,
    make_batch,
    reference_model,
    save_models,
)
from tests.zoo import padded_batches
from tests.zoo.megatron_models import (
    DENSE_FLOAT32,
    load_canonical,
    negative_log_likelihood,
    reference_of,
    running,
    whole_weights,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import mtp_losses, read_canonical

BIASED = {
    num_ranks: {name: case for name, case in cases.items() if case.model.startswith("deepseek_v3")}
    for num_ranks, cases in CASES.items()
}
UPDATE_RATE = 1e-3
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0])[None]
"""Labels that multi-token prediction learns from; the loss is the mean over all."""


@dataclass(frozen=True)
class Stepped:
    """What one rank has after a training step.

    Attributes:
        losses: of the multi-token prediction layers, as Megatron logs them; on the last stage.
        weights: of all ranks, those of multi-token prediction and the biases, by name in the checkpoint; on rank 0.
        masked_norm: of the gradients of a step that masks every label.
        masked_gradients: the largest in that step of each parameter of the layers for multi-token prediction.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    masked_norm: float
    masked_gradients: list[float]


def step(case: Case, path: Path) -> Stepped:
    with running(path, case.config()) as run:
        load_canonical(run, path)
        engine, batch = run.engine, share_of(run.engine, make_batch())
        mask = MASK.expand_as(batch["tokens"])
        losses = _losses_of_step(run, {**batch, "mask": mask})
        weights = {
            name: tensor
            for name, tensor in whole_weights(engine.weights).items()
            if not run.table.is_served(name) or name.endswith("e_score_correction_bias")
        }
        masked = engine.train_step({**batch, "mask": 0 * mask}, negative_log_likelihood)
        gradients = [
            parameter.main_grad.abs().max().item()
            for name, parameter in engine.weights.model.named_parameters()
            if "mtp." in name
        ]
        return Stepped(losses, weights if torch.distributed.get_rank() == 0 else {}, masked["grad_norm"], gradients)


def _losses_of_step(run: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """Averaged over micro batches."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    run.engine.train_step(batch, negative_log_likelihood)
    run.engine.weights.prepare()
    if not MTPLossLoggingHelper.tracker:
        return []
    what, values = ("metrics", "loss_values") if Version("0.19.0") <= INSTALLED else ("loss", "values")
    getattr(MTPLossLoggingHelper, f"reduce_{what}_in_tracker")()
    num_micro_batches = len(batch["tokens"]) // run.engine.micro_batch_size
    return (MTPLossLoggingHelper.tracker[values] / num_micro_batches).tolist()


@dataclass(frozen=True)
class Packed:
    """The losses of multi-token prediction on sequences in rows of their own, on the left or the right, and packed."""

    right: list[float]
    left: list[float]
    packed: list[float]
    no_packing: str


def pack_sequences(case: Case, path: Path) -> Packed:
    """Each way in one micro batch, whose tokens Megatron takes the mean of."""
    with running(path, case.config()) as run:
        load_canonical(run, path)
        run.engine.set_learning_rate(0.0)
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        losses, given = [], padded_batches.batches()
        for way in ("right", "left", "packed"):
            run.engine.micro_batch_size = len(given[way]["tokens"])
            is_refused = way == "packed" and run.engine.limits.no_packing
            with pytest.raises(BatchError, match="2 MTP layers") if is_refused else nullcontext():
                losses.append(_losses_of_step(run, given[way]))
        losses += [[]] * (3 - len(losses))
        return Packed(*losses, run.engine.limits.no_packing)


@dataclass(frozen=True)
class Biases:
    """The biases in bfloat16 training.

    Attributes:
        stay: whether a step leaves them in their memory.
        moved_by: the largest difference that it makes to each.
        reference_is_same: whether a model that copied the weights scores as the actor did.
    """

    dtypes: set[torch.dtype]
    stay: bool
    moved_by: list[float]
    reference_is_same: bool


def step_in_bfloat16(path: Path) -> Biases:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, "params_dtype": "bfloat16", **EP2})) as run:
        load_canonical(run, path)
        biases = {name: bias for name, bias in run.engine.weights.model.named_weights() if name.endswith("expert_bias")}
        before = {name: bias.clone() for name, bias in biases.items()}
        addresses = {name: bias.data_ptr() for name, bias in biases.items()}
        reference = reference_of(run, path)
        reference.copy_weights_from(run.engine)
        batch = share_of(run.engine, make_batch())
        is_same = torch.equal(reference.log_probs(batch), run.engine.log_probs(batch))
        run.engine.train_step(batch, negative_log_likelihood)
        run.engine.weights.prepare()
        return Biases(
            dtypes={bias.dtype for bias in biases.values()},
            stay={name: bias.data_ptr() for name, bias in biases.items()} == addresses,
            moved_by=[float((bias - before[name]).abs().max()) for name, bias in biases.items()],
            reference_is_same=is_same,
        )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], Outcomes]:
    """Number of ranks -> what its cases brought back; each number is launched once."""

    def launch_on(num_ranks: int) -> Outcomes:
        calls: dict[str, Call] = {name: (step, (case, paths[case.model])) for name, case in BIASED[num_ranks].items()}
        if num_ranks == 2:
            for num_layers in ("one mtp layer", "two mtp layers"):
                model = f"deepseek_v3, {num_layers}"
                calls[num_layers] = pack_sequences, (Case(model, TP2), paths[model])
            calls["bfloat16"] = step_in_bfloat16, (paths["deepseek_v3"],)
        return engines.launch_in_turn(num_ranks, calls)

    return functools.cache(launch_on)


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for num_ranks, cases in BIASED.items() for name in cases]
)
def test_the_bias_moves_by_counts(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    """By the update rate towards experts that got fewer tokens than the mean; the decoder's counts by transformers."""
    model = BIASED[num_ranks][name].model
    initial, counts = read_canonical(paths[model]), count_tokens(model)
    found = launched(num_ranks)[name][0].weights
    assert counts
    for layer, count in counts.items():
        tensor = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        close(found[tensor], initial[tensor] + UPDATE_RATE * torch.sign(count.mean() - count), tensor, 1e-7)


@functools.cache
def count_tokens(model_name: str) -> dict[int, torch.Tensor]:
    """Decoder layer -> tokens of the batch that each of its experts gets, by transformers."""
    model, counts = reference_model(model_name), {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):

            def count(_gate: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...], layer: int = layer) -> None:
                counts[layer] = torch.bincount(outputs[2].flatten(), minlength=outputs[0].shape[-1]).float()

            block.mlp.gate.register_forward_hook(count)
    with torch.no_grad():
        model(make_batch()["tokens"])
    return counts


PREDICTING = [
    (num_ranks, name) for num_ranks, cases in BIASED.items() for name, case in cases.items() if case.num_mtp_layers
]


@pytest.mark.parametrize(("num_ranks", "name"), PREDICTING)
def test_losses_of_multi_token_prediction_are_those_of_transformers_layers(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    model = BIASED[num_ranks][name].model
    batch = {**make_batch(), "mask": MASK.expand(BATCH, -1)}
    expected = mtp_losses(paths[model], reference_model(model), batch)
    logged = [found.losses for found in launched(num_ranks)[name] if found.losses]
    assert logged
    assert all(losses == pytest.approx(expected, abs=1e-4) for losses in logged)


@pytest.mark.parametrize(("num_ranks", "name"), PREDICTING)
def test_multi_token_prediction_learns(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    case = BIASED[num_ranks][name]
    initial, found = read_canonical(paths[case.model]), launched(num_ranks)[name][0].weights
    assert len([tensor for tensor in found if not tensor.endswith("bias")]) > 10 * case.num_mtp_layers
    assert [tensor for tensor, values in found.items() if torch.equal(values, initial[tensor])] == []


@pytest.mark.parametrize(("num_ranks", "name"), PREDICTING)
def test_multi_token_prediction_learns_nothing_from_a_batch_without_labels(
    launched: Callable[[int], Outcomes], num_ranks: int, name: str
) -> None:
    """And the others' gradients are finite."""
    found = launched(num_ranks)[name]
    assert all(math.isfinite(one.masked_norm) for one in found)
    gradients = [largest for one in found for largest in one.masked_gradients]
    assert gradients
    assert max(gradients) == 0


def test_multi_token_prediction_learns_neither_padding_nor_across_sequences(
    launched: Callable[[int], Outcomes],
) -> None:
    for num_layers in ("one mtp layer", "two mtp layers"):
        for found in launched(2)[num_layers]:
            assert found.left == found.right
            assert min(found.right) > 0
    assert all(found.packed == pytest.approx(found.right, abs=1e-5) for found in launched(2)["one mtp layer"])
    assert all("learn across their borders" in found.no_packing for found in launched(2)["two mtp layers"])


def test_a_model_without_multi_token_prediction_logs_no_loss_of_it(launched: Callable[[int], Outcomes]) -> None:
    assert [found.losses for found in launched(2)["deepseek_v3 tp2"]] == [[], []]


def test_the_bias_is_float32_and_stays_where_it_is_in_bfloat16_training(launched: Callable[[int], Outcomes]) -> None:
    for biases in launched(2)["bfloat16"]:
        assert biases.dtypes == {torch.float32}
        assert biases.stay
        assert biases.moved_by == pytest.approx([UPDATE_RATE] * len(biases.moved_by), abs=1e-6)


def test_a_reference_of_bfloat16_training_scores_the_same(launched: Callable[[int], Outcomes]) -> None:
    assert all(biases.reference_is_same for biases in launched(2)["bfloat16"])
