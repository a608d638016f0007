"""Megatron with experts, latent attention, MTP and uneven pipelines, against transformers.

Logits, losses and gradient norms of training steps, and all trained weights are compared with one
transformers model. Two features that transformers lacks in training are computed here: a router
bias updated by token counts, and the loss of multi-token prediction (MTP).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.core_versions import INSTALLED
from tests.harness.launch import Call, Outcomes, Ranks
from tests.zoo import padded_batches
from tests.zoo.families import YARN
from tests.zoo.megatron_models import (
    DENSE_FLOAT32,
    load_canonical,
    negative_log_likelihood,
    running,
    whole_weights,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import build_hf_model, mtp_losses, read_canonical, save_model, token_batch, train_hf_model

WINDOWS = {"use_sliding_window": True, "sliding_window": 4}  # shorter than the sequences
# name -> (family, changes of the family's config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "norm_topk_prob": False, **WINDOWS},
    ),
    "qwen2_moe": ("qwen2_moe", WINDOWS),
    "mixtral": ("mixtral", {}),
    "deepseek_v2": ("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v2, plain queries, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, three experts, yarn": ("deepseek_v3", {"num_experts_per_tok": 3, "rope_parameters": YARN}),
    "deepseek_v3, one mtp layer": ("deepseek_v3", {"mtp_layers": 1}),
    "deepseek_v3, two mtp layers": ("deepseek_v3", {"mtp_layers": 2}),
    "qwen3, three layers": ("qwen3", {"num_hidden_layers": 3}),
    "qwen3, four layers, tied": ("qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Case:
    """A model and its Megatron layout; the remaining ranks are data parallel."""

    model: str
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def num_mtp_layers(self) -> int:
        return MODELS[self.model][1].get("mtp_layers", 0)

    def config(self) -> ActorConfig:
        optimizer = {"lr": 3e-3, "weight_decay": WEIGHT_DECAY, "adam_eps": ADAM_EPS}
        return ActorConfig(**{**DENSE_FLOAT32, **self.actor, "optimizer": optimizer})


# With the usual epsilon Adam turns rounding errors of tiny gradients into whole steps.
ADAM_EPS = 1e-3
WEIGHT_DECAY = 0.1

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
ETP2 = {"expert_tensor_parallel_size": 2}
FIRST1 = {"num_layers_in_first_pipeline_stage": 1}
LAST1 = {"num_layers_in_last_pipeline_stage": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PLAIN = {"use_distributed_optimizer": False}

# By number of ranks; the installed megatron-core decides about the last cases.
CASES: dict[int, dict[str, Case]] = {
    2: {
        "qwen3_moe ep2": Case("qwen3_moe", EP2),
        "qwen3_moe tp2 etp2": Case("qwen3_moe", TP2),
        "qwen3_moe tp2 ep2 etp1, plain optimizer": Case("qwen3_moe", {**TP2, **EP2, **ETP1, **PLAIN}),
        "qwen3_moe dense layers, ep2, plain optimizer": Case("qwen3_moe, some layers dense", {**EP2, **PLAIN}),
        "qwen2_moe tp2 ep2 etp1": Case("qwen2_moe", {**TP2, **EP2, **ETP1}),
        "mixtral pp2": Case("mixtral", PP2),
        "mixtral ep2, overlap": Case("mixtral", {**EP2, **OVERLAP}),
        "deepseek_v2 tp2": Case("deepseek_v2", TP2),
        "deepseek_v2, plain queries tp2 ep2 etp1": Case("deepseek_v2, plain queries, groups", {**TP2, **EP2, **ETP1}),
        "deepseek_v3 tp2": Case("deepseek_v3", TP2),
        "deepseek_v3 pp2, first 1": Case("deepseek_v3, three experts, yarn", {**PP2, **FIRST1}),
        "deepseek_v3 mtp tp2 ep2 etp1": Case("deepseek_v3, two mtp layers", {**TP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2, last 1": Case("deepseek_v3, two mtp layers", {**PP2, **LAST1}),
        "deepseek_v3 mtp pp2, layout": Case(
            "deepseek_v3, two mtp layers", {**PP2, "pipeline_model_parallel_layout": "Ettt|mmL"}
        ),
        "qwen3 pp2, first 1": Case("qwen3, three layers", {**PP2, **FIRST1}),
        "qwen3 pp2, both ends count": Case(
            "qwen3, four layers, tied",
            {**PP2, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        ),
        "qwen3 pp2 vpp2, layout": Case(
            "qwen3, four layers, tied", {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|L"}
        ),
        "qwen3 pp2 vpp2, ends do nothing": Case(
            "qwen3, four layers, tied", {**PP2, **VPP2, "noop_layers": (0, 4, 6, 7)}
        ),
        "deepseek_v3 pp2, middle does nothing": Case("deepseek_v3", {**PP2, "noop_layers": (1,)}),
    },
    4: {
        "qwen3_moe tp2 ep2 etp2": Case("qwen3_moe", {**TP2, **EP2, **ETP2}),
        "mixtral tp2 pp2 ep2 etp1": Case("mixtral", {**TP2, **PP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2 ep2, last 1": Case("deepseek_v3, two mtp layers", {**PP2, **EP2, **LAST1}),
        "deepseek_v3 mtp pp4, mtp by itself": Case(
            "deepseek_v3, two mtp layers",
            {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|tt|mm|L"},
        ),
        "deepseek_v3 tp4 ep2 etp2": Case(
            "deepseek_v3", {**TP2, "tensor_model_parallel_size": 4, **EP2, **ETP2, **OVERLAP}
        ),
        "qwen3 pp4, nothing in the middle": Case(
            "qwen3, three layers", {"pipeline_model_parallel_size": 4, "noop_layers": (1, 3, 4), **FIRST1, **LAST1}
        ),
    },
}
if Version("0.19.0") <= INSTALLED:
    CASES[2] |= {
        "qwen3 HybridModel pp2": Case("qwen3, three layers", {**PP2, "hybrid_layer_pattern": "*-*|-*-"}),
        "qwen3 HybridModel pp2 vpp2": Case("qwen3, four layers, tied", {**PP2, "hybrid_layer_pattern": "*-|*|-*-|*-"}),
        "qwen3_moe HybridModel tp2 ep2 etp1": Case("qwen3_moe", {**TP2, **EP2, **ETP1, "hybrid_layer_pattern": "*E*E"}),
        "deepseek_v2 HybridModel tp2": Case("deepseek_v2", {**TP2, "hybrid_layer_pattern": "+-+E+E"}),
    }
BATCH = 4
LENGTH = 12


def reference_model(model: str) -> torch.nn.Module:
    family, changes = MODELS[model]
    return build_hf_model(family, **changes)


def save_models(directory: Path) -> dict[str, Path]:
    """Save every model as a checkpoint with the weights of `reference_model`."""
    return {
        name: save_model(directory / str(number), family, **changes)
        for number, (name, (family, changes)) in enumerate(MODELS.items())
    }


def make_batch() -> TensorDict:
    return token_batch(3, BATCH, LENGTH)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, where: str, atol: float) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0, msg=lambda message: f"{where}: {message}")


# fp32 sums are only reordered; losses reach about 5.
ATOL = 2e-5
NUM_STEPS = 2


@dataclass(frozen=True)
class Trained:
    """Results of one rank.

    Attributes:
        reports: one per step.
        log_probs: of the whole batch after training.
        weights: trained weights of all ranks by checkpoint name; on rank 0 only.
    """

    reports: list[dict[str, float]]
    log_probs: torch.Tensor
    weights: TensorDict


def train(case: Case, path: Path) -> Trained:
    """Train without the two features that transformers lacks."""
    with running(path, case.config()) as run:
        load_canonical(run, path)
        engine = run.engine
        batch = share_of(run.engine, make_batch())
        settings = run.actor.transformer_config
        # transformers has no moving router bias and no loss for MTP.
        settings.moe_router_bias_update_rate = settings.mtp_loss_scaling_factor = 0.0
        reports = [engine.train_step(batch, negative_log_likelihood) for _ in range(NUM_STEPS)]
        log_probs = engine.data_parallel.gather(engine.log_probs(batch))
        engine.model.weights.prepare()
        weights = whole_weights(engine.model.weights)
        buffers = engine.model.weights.layout().buffers.values()
        assert all(buffer.exported for buffer in buffers), "peers cannot read all buffers"
        return Trained(reports, log_probs, weights if torch.distributed.get_rank() == 0 else {})


# Cases on two ranks that also read batches padded on either side, and packed batches.
PADDED = ("mixtral ep2, overlap", "deepseek_v2 tp2", "deepseek_v3 pp2, first 1")


def read_padded(case: Case, path: Path) -> dict[str, padded_batches.Read]:
    with running(path, case.config()) as run:
        load_canonical(run, path)
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        return padded_batches.read_all(run.engine)


@dataclass(frozen=True)
class Reference:
    """Results of transformers with torch's Adam.

    Attributes:
        weights: trained weights by checkpoint name.
        initial: tensors of the checkpoint.
    """

    losses: list[float]
    norms: list[float]
    log_probs: torch.Tensor
    weights: TensorDict
    initial: TensorDict


@dataclass(frozen=True)
class Compared:
    """A case with the results of its ranks and of transformers."""

    case: Case
    ranks: list[Trained]
    expected: Reference


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], Outcomes]:
    """Return a function from a number of ranks to the results of its cases, launched once."""

    def launch_on(num_ranks: int) -> Outcomes:
        cases = CASES[num_ranks]
        calls: dict[str, Call] = {name: (train, (case, paths[case.model])) for name, case in cases.items()}
        for name in PADDED:
            if name in cases:
                calls[f"{name}, padded"] = read_padded, (cases[name], paths[cases[name].model])
        calls |= {f"{name}, biased": (step, (case, paths[case.model])) for name, case in BIASED[num_ranks].items()}
        if num_ranks == 2:
            for num_layers in ("one mtp layer", "two mtp layers"):
                model = f"deepseek_v3, {num_layers}"
                calls[num_layers] = pack_sequences, (Case(model, TP2), paths[model])
            calls["bfloat16"] = step_in_bfloat16, (paths["deepseek_v3"],)
        return engines.launch_in_turn(num_ranks, calls, timeout=600)

    return functools.cache(launch_on)


@pytest.fixture(scope="module")
def references(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return a function from a model's name to the results of transformers."""

    def computed(name: str) -> Reference:
        model = reference_model(name)
        batch = make_batch()
        losses, norms, log_probs = train_hf_model(model, batch, NUM_STEPS, weight_decay=WEIGHT_DECAY, eps=ADAM_EPS)
        model.save_pretrained(trained := tmp_path_factory.mktemp("trained"))
        return Reference(losses, norms, log_probs, read_canonical(trained), read_canonical(paths[name]))

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


def test_training_equals_transformers(compared: Compared) -> None:
    for result in compared.ranks:
        assert [report["loss"] for report in result.reports] == pytest.approx(compared.expected.losses, abs=1e-4)
        assert [report["grad_norm"] for report in result.reports] == pytest.approx(compared.expected.norms, rel=1e-3)
        assert_close(result.log_probs, compared.expected.log_probs, "log-probabilities", ATOL)


def test_trained_weights_equal_transformers(compared: Compared) -> None:
    actual = compared.ranks[0].weights
    expected = compared.expected
    assert actual.keys() == expected.initial.keys()
    for tensor, values in expected.weights.items():
        assert_close(actual[tensor], values, tensor, ATOL)
        # Every other tensor moved in training, so that the comparison is not trivial.
        is_bias = tensor.endswith("e_score_correction_bias")
        assert torch.equal(values, expected.initial[tensor]) == is_bias, tensor


@pytest.mark.parametrize("name", [name for name in PADDED if name in CASES[2]])
def test_padding_and_packing_do_not_change_results(launched: Callable[[int], Outcomes], name: str) -> None:
    """Results and gradients agree with the plain batch, also with latent attention."""
    for reads in launched(2)[f"{name}, padded"]:
        padded_batches.assert_all_ways_agree(reads, ATOL)
        padded_batches.assert_is_that_of_logits(reads["right"], reference_model(CASES[2][name].model))


BIASED = {
    num_ranks: {name: case for name, case in cases.items() if case.model.startswith("deepseek_v3")}
    for num_ranks, cases in CASES.items()
}
UPDATE_RATE = 1e-3
# Labels that MTP learns from; its loss is still the mean over all labels.
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0])[None]


@dataclass(frozen=True)
class Stepped:
    """Results of one rank after a training step.

    Attributes:
        losses: MTP losses as Megatron logs them; on the last stage.
        weights: MTP weights and router biases of all ranks by checkpoint name; on rank 0.
        masked_norm: gradient norm of a step that masks every label.
        masked_gradients: largest gradient in that step, one per parameter of the MTP layers.
    """

    losses: list[float]
    weights: TensorDict
    masked_norm: float
    masked_gradients: list[float]


def step(case: Case, path: Path) -> Stepped:
    with running(path, case.config()) as run:
        load_canonical(run, path)
        engine = run.engine
        batch = share_of(run.engine, make_batch())
        mask = MASK.expand_as(batch["tokens"])
        losses = _mtp_losses_of_step(run.engine, {**batch, "mask": mask})
        weights = {
            name: tensor
            for name, tensor in whole_weights(engine.model.weights).items()
            if not run.table.is_served(name) or name.endswith("e_score_correction_bias")
        }
        # No label is left.
        masked_report = engine.train_step({**batch, "mask": 0 * mask}, negative_log_likelihood)
        gradients = [
            parameter.main_grad.abs().max().item()
            for name, parameter in engine.model.weights.model.named_parameters()
            if "mtp." in name
        ]
        is_first = torch.distributed.get_rank() == 0
        return Stepped(losses, weights if is_first else {}, masked_report["grad_norm"], gradients)


def _mtp_losses_of_step(engine: Any, batch: TensorDict) -> list[float]:
    """Train one step and return the logged MTP losses, averaged over micro batches."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    engine.train_step(batch, negative_log_likelihood)
    engine.model.weights.prepare()
    if not MTPLossLoggingHelper.tracker:
        return []
    if Version("0.19.0") <= INSTALLED:
        MTPLossLoggingHelper.reduce_metrics_in_tracker()
        losses = MTPLossLoggingHelper.tracker["loss_values"]
    else:
        MTPLossLoggingHelper.reduce_loss_in_tracker()
        losses = MTPLossLoggingHelper.tracker["values"]
    num_micro_batches = len(batch["tokens"]) // engine.limits.micro_batch_size
    return (losses / num_micro_batches).tolist()


@dataclass(frozen=True)
class Packed:
    """MTP losses of rows padded on the right, padded on the left, and packed."""

    right: list[float]
    left: list[float]
    packed: list[float]
    no_packing: str


def pack_sequences(case: Case, path: Path) -> Packed:
    """Run each arrangement as one micro batch, because Megatron takes the mean per micro batch."""
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

    with running(path, case.config()) as run:
        load_canonical(run, path)
        run.engine.optimizer.set_learning_rate(0.0)  # all arrangements see the same weights
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        losses = []
        batches = padded_batches.batches()
        for arrangement in ("right", "left", "packed"):
            engine = TrainEngine(run.actor, run.table, micro_batch_size=len(batches[arrangement]["tokens"]))
            is_refused = arrangement == "packed" and engine.limits.no_packing
            with pytest.raises(BatchError, match="2 MTP layers") if is_refused else nullcontext():
                losses.append(_mtp_losses_of_step(engine, batches[arrangement]))
        losses += [[]] * (3 - len(losses))  # a refused arrangement has no losses
        return Packed(*losses, run.engine.limits.no_packing)


@dataclass(frozen=True)
class Biases:
    """Router biases in bfloat16 training, and types of all buffers of routers.

    Attributes:
        stay: whether a step leaves them at the same address.
        moved_by: largest change in one step, one per bias.
    """

    dtypes: set[torch.dtype]
    stay: bool
    moved_by: list[float]


def step_in_bfloat16(path: Path) -> Biases:

    with running(path, ActorConfig(**{**DENSE_FLOAT32, "params_dtype": "bfloat16", **EP2})) as run:
        load_canonical(run, path)
        biases = {
            name: bias for name, bias in run.engine.model.weights.model.named_weights() if name.endswith("expert_bias")
        }
        before = {name: bias.clone() for name, bias in biases.items()}
        # Peers read the biases at these addresses.
        addresses = {name: bias.data_ptr() for name, bias in biases.items()}
        batch = share_of(run.engine, make_batch())
        run.engine.train_step(batch, negative_log_likelihood)
        run.engine.model.weights.prepare()
        return Biases(
            dtypes={
                buffer.dtype
                for chunk in run.actor.chunks
                for name, buffer in chunk.module.named_buffers()
                if ".router." in name
            },
            stay={name: bias.data_ptr() for name, bias in biases.items()} == addresses,
            moved_by=[float((bias - before[name]).abs().max()) for name, bias in biases.items()],
        )


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for num_ranks, cases in BIASED.items() for name in cases]
)
def test_router_bias_follows_token_counts(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    model = BIASED[num_ranks][name].model
    initial = read_canonical(paths[model])
    counts = count_tokens(model)
    actual = launched(num_ranks)[f"{name}, biased"][0].weights
    assert counts
    for layer, count in counts.items():
        tensor = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        # Towards experts below the mean token count.
        assert_close(actual[tensor], initial[tensor] + UPDATE_RATE * torch.sign(count.mean() - count), tensor, 1e-7)


@functools.cache
def count_tokens(model_name: str) -> dict[int, torch.Tensor]:
    """Map each decoder layer to the tokens per expert, counted in transformers."""
    model = reference_model(model_name)
    counts = {}
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
def test_mtp_losses_equal_transformers_layers(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    model = BIASED[num_ranks][name].model
    batch = {**make_batch(), "mask": MASK.expand(BATCH, -1)}
    expected = mtp_losses(paths[model], reference_model(model), batch)
    logged = [result.losses for result in launched(num_ranks)[f"{name}, biased"] if result.losses]
    assert logged
    assert all(losses == pytest.approx(expected, abs=1e-4) for losses in logged)


@pytest.mark.parametrize(("num_ranks", "name"), PREDICTING)
def test_a_training_step_changes_all_mtp_weights(
    launched: Callable[[int], Outcomes], paths: dict[str, Path], num_ranks: int, name: str
) -> None:
    case = BIASED[num_ranks][name]
    initial = read_canonical(paths[case.model])
    trained = launched(num_ranks)[f"{name}, biased"][0].weights
    assert len([tensor for tensor in trained if not tensor.endswith("bias")]) > 10 * case.num_mtp_layers
    assert [tensor for tensor, values in trained.items() if torch.equal(values, initial[tensor])] == []


@pytest.mark.parametrize(("num_ranks", "name"), PREDICTING)
def test_mtp_learns_nothing_from_a_batch_without_labels(
    launched: Callable[[int], Outcomes], num_ranks: int, name: str
) -> None:
    ranks = launched(num_ranks)[f"{name}, biased"]
    assert all(math.isfinite(rank.masked_norm) for rank in ranks)
    gradients = [largest for rank in ranks for largest in rank.masked_gradients]
    assert gradients
    assert max(gradients) == 0


def test_mtp_does_not_learn_padding_or_across_sequences(
    launched: Callable[[int], Outcomes],
) -> None:
    for num_layers in ("one mtp layer", "two mtp layers"):
        for losses in launched(2)[num_layers]:
            assert losses.left == losses.right
            assert min(losses.right) > 0
    # Only one MTP layer supports packing.
    assert all(losses.packed == pytest.approx(losses.right, abs=1e-5) for losses in launched(2)["one mtp layer"])
    assert all("2 MTP layers" in losses.no_packing for losses in launched(2)["two mtp layers"])


def test_router_bias_stays_float32_at_its_address_in_bfloat16_training(launched: Callable[[int], Outcomes]) -> None:
    for biases in launched(2)["bfloat16"]:
        assert biases.dtypes == {torch.float32}
        assert biases.stay
        assert biases.moved_by == pytest.approx([UPDATE_RATE] * len(biases.moved_by), abs=1e-6)
