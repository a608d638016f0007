"""Megatron with experts, latent attention, multi-token prediction and uneven pipelines, against transformers.

Everything that can be spread over ranks is compared with one transformers model: logits, losses and gradient norms of
training steps, and every weight after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.worker import share_of
from tests.harness.launch import Ranks, remembered
from tests.zoo.families import YARN, read_config
from tests.zoo.megatron_models import (
    DENSE_FLOAT32,
    load_canonical,
    negative_log_likelihood,
    parallel_state_of,
    reference_of,
    running,
    whole_weights,
)
from tests.zoo.tiny_models import build_hf_model, mtp_losses, read_canonical, save_model, token_batch, train_hf_model

# fp32: sums in another order only. Logits reach about 4, losses 5.
ATOL = 2e-5
# Weights after training, and log-probabilities. With a usual epsilon Adam turns the rounding of tiny gradients into
# whole steps.
TRAINED_ATOL = 2e-5
ADAM_EPS = 1e-3
NUM_STEPS = 2

# name -> (family, what differs from the family's sizes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v2": ("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v2, plain queries, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, three experts, yarn": ("deepseek_v3", {"num_experts_per_tok": 3, "rope_parameters": YARN}),
    "deepseek_v3, two mtp layers": ("deepseek_v3", {"mtp_layers": 2}),
    "qwen3, three layers": ("qwen3", {"num_hidden_layers": 3}),
    "qwen3, four layers, tied": ("qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Case:
    """A model and how Megatron spreads it; data parallel ranks are what remains."""

    model: str
    actor: dict[str, Any] = field(default_factory=dict)


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
FIRST1, LAST1 = {"num_layers_in_first_pipeline_stage": 1}, {"num_layers_in_last_pipeline_stage": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PLAIN = {"use_distributed_optimizer": False}

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
            {
                **PP2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
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
            "qwen3, three layers",
            {"pipeline_model_parallel_size": 4, "noop_layers": (1, 3, 4), **FIRST1, **LAST1},
        ),
    },
}
BATCH, LENGTH = 4, 12
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0])[None]
"""Labels that multi-token prediction learns from; the loss is the mean over all."""


def reference_model(model: str) -> torch.nn.Module:
    family, changes = MODELS[model]
    return build_hf_model(family, **changes)


def save_reference(directory: Path, model: str) -> Path:
    family, changes = MODELS[model]
    return save_model(directory, family, **changes)


def make_batch() -> dict[str, torch.Tensor]:
    return token_batch(3, BATCH, LENGTH)


# -- on the ranks --------------------------------------------------------------------------------------------------


def run_cases(cases: dict[str, Case], paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """On every rank: what each engine computes; on two ranks also what is in half precision or refused."""
    found = {name: run_case(case, paths[case.model]) for name, case in cases.items()}
    if torch.distributed.get_world_size() == 2:
        found[FURTHER] = half_precision_and_refusals(paths)
    return found


FURTHER = "half precision and refusals"


def run_case(case: Case, path: Path) -> dict[str, Any]:
    """Steps without what transformers has not: a bias that moves, a loss for multi-token prediction."""
    optimizer = {"lr": 3e-3, "weight_decay": 0.1, "adam_eps": ADAM_EPS}
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **case.actor, "optimizer": optimizer})) as run:
        load_canonical(run, path)
        engine, batch, settings = run.engine, share_of(run.engine, make_batch()), run.actor.transformer_config
        rates = settings.moe_router_bias_update_rate, settings.mtp_loss_scaling_factor
        settings.moe_router_bias_update_rate = settings.mtp_loss_scaling_factor = 0.0
        result = {
            "logits": engine.gather_over_data_parallel(engine.logits(batch["tokens"])),
            "reports": [engine.train_step(batch, negative_log_likelihood) for _ in range(NUM_STEPS)],
            "final": engine.gather_over_data_parallel(engine.log_probs(batch)),
        }
        engine.weights.prepare()
        result["weights"] = whole_weights(engine.weights)
        result["offload"] = describe_offload(run)
        settings.moe_router_bias_update_rate, settings.mtp_loss_scaling_factor = rates
        load_canonical(run, path)
        mask = MASK.expand_as(batch["tokens"])
        result["mtp losses"] = mtp_losses_of_step(run, {**batch, "mask": mask})
        result["after a free step"] = {
            name: tensor
            for name, tensor in whole_weights(engine.weights).items()
            if not run.table.is_served(name) or name.endswith("e_score_correction_bias")
        }
        result["all masked"] = engine.train_step({**batch, "mask": 0 * mask}, negative_log_likelihood)["grad_norm"]
        return result if torch.distributed.get_rank() == 0 else {**result, "weights": None, "after a free step": None}


def mtp_losses_of_step(run: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """What Megatron logs for the multi-token prediction layers of one training step; averaged over micro batches."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    run.engine.train_step(batch, negative_log_likelihood)
    run.engine.weights.prepare()
    if not MTPLossLoggingHelper.tracker:
        return []
    MTPLossLoggingHelper.reduce_loss_in_tracker()
    return (MTPLossLoggingHelper.tracker["values"] / len(batch["tokens"])).tolist()


def describe_offload(run: Any) -> dict[str, Any]:
    """What the offloader would take, against Megatron's own buffers."""
    items = run.engine.offload_items()
    held = {item.tensor.untyped_storage().data_ptr() for item in items if item.kind != "optimizer"}
    missing = [
        name
        for name, tensor in run.engine.weights.model.named_weights()
        if tensor.untyped_storage().data_ptr() not in held
        or (isinstance(tensor, torch.nn.Parameter) and tensor.main_grad.untyped_storage().data_ptr() not in held)
    ]
    layout = run.engine.weights.layout()
    return {
        "missing": missing,
        "expert buffers": sum("expert" in name for name in run.engine.weights.buffers() if name.startswith("chunk")),
        "not exported": [name for name, buffer in layout.buffers.items() if not buffer.exported],
        "owners are unique": len({item.owner for item in items}) == len(items),
    }


def half_precision_and_refusals(paths: dict[str, Path]) -> dict[str, Any]:
    """On both ranks: the bias in bfloat16 training, a reference's weights, and models that are not built."""
    from hybrid_engine.backends.megatron.build import build_model

    path = paths["deepseek_v3"]
    found: dict[str, Any] = {}
    config = ActorConfig(**{**DENSE_FLOAT32, "params_dtype": "bfloat16", **EP2})
    with running(path, config) as run:
        load_canonical(run, path)
        biases = {n: t for n, t in run.engine.weights.model.named_weights() if n.endswith("expert_bias")}
        before = {name: bias.clone() for name, bias in biases.items()}
        addresses = {name: bias.data_ptr() for name, bias in biases.items()}
        reference = reference_of(run, path)
        reference.copy_weights_from(run.engine)
        batch = share_of(run.engine, make_batch())
        same = torch.equal(reference.log_probs(batch), run.engine.log_probs(batch))
        run.engine.train_step(batch, negative_log_likelihood)
        run.engine.weights.prepare()
        found["bias"] = {
            "dtypes": {str(bias.dtype) for bias in biases.values()},
            "stays where it is": all(bias.data_ptr() == addresses[name] for name, bias in biases.items()),
            "moved by": {float((bias - before[name]).abs().max()) for name, bias in biases.items()},
            "reference": same,
        }
    table = run.table
    for name, actor in {
        "experts without sequence parallel": {**TP2, "sequence_parallel": False},
        "experts cut otherwise": {**TP2, **ETP1},
        "positions": {"noop_layers": (1, 1)},
        "context": {"context_parallel_size": 2},
    }.items():
        config = ActorConfig(**{**DENSE_FLOAT32, **actor})
        with parallel_state_of(config):
            with pytest.raises(ConfigError) as caught:
                build_model(config, table, read_config(path), dist.get_world_size())
            found[name] = str(caught.value)
            if name == "positions":
                continue
            chunks, _ = build_model(config, table, read_config(path), dist.get_world_size(), weights_only=True)
            found[f"{name}, weights only"] = sum(parameter.numel() for parameter in chunks[0].parameters())
    return found


# -- in the test's process -----------------------------------------------------------------------------------------

Results = dict[str, tuple[Case, list[dict[str, Any]]]]
References = dict[str, "Reference"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {model: save_reference(tmp_path_factory.mktemp("model"), model) for model in MODELS}


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], list[dict[str, dict[str, Any]]]]:
    """Number of ranks -> what each rank brought back; every number is launched once."""
    return remembered(lambda num_ranks: engines.launch(run_cases, num_ranks, CASES[num_ranks], paths, timeout=600))


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda ranks: f"{ranks} ranks")
def results(request: pytest.FixtureRequest, launched: Callable[[int], Any]) -> Results:
    """Case by name, and what each rank computed."""
    by_rank = launched(request.param)
    return {name: (case, [rank[name] for rank in by_rank]) for name, case in CASES[request.param].items()}


@dataclass(frozen=True)
class Reference:
    """The same with transformers: before training, and after it with torch's Adam."""

    logits: torch.Tensor
    losses: list[float]
    norms: list[float]
    final: torch.Tensor
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def references(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    found = {}
    for name, path in paths.items():
        model, batch = reference_model(name), make_batch()
        with torch.no_grad():
            logits = model(batch["tokens"]).logits
        losses, norms, final = train_hf_model(model, batch, NUM_STEPS, weight_decay=0.1, eps=ADAM_EPS)
        model.save_pretrained(trained := tmp_path_factory.mktemp("trained"))
        found[name] = Reference(logits, losses, norms, final, read_canonical(trained), read_canonical(path))
    return found


def close(found: torch.Tensor, expected: torch.Tensor, where: str, atol: float) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda message: f"{where}: {message}")


def test_logits_are_those_of_transformers(results: Results, references: References) -> None:
    for name, (case, ranks) in results.items():
        assert references[case.model].logits.abs().max() > 1, "logits this small show little"
        for rank, result in enumerate(ranks):
            close(result["logits"], references[case.model].logits, f"{name}, rank {rank}", ATOL)


def test_training_follows_transformers(results: Results, references: References) -> None:
    """Losses, gradient norms, log-probabilities and every weight; those of experts that no token chose stay."""
    for name, (case, ranks) in results.items():
        expected = references[case.model]
        for result in ranks:
            assert [report["loss"] for report in result["reports"]] == pytest.approx(expected.losses, abs=1e-4), name
            norms = [report["grad_norm"] for report in result["reports"]]
            assert norms == pytest.approx(expected.norms, rel=1e-3), name
            close(result["final"], expected.final, name, TRAINED_ATOL)
        weights = ranks[0]["weights"]
        assert weights.keys() == expected.initial.keys(), name
        for tensor, values in expected.weights.items():
            close(weights[tensor], values, f"{name}: {tensor}", TRAINED_ATOL)
            is_bias = tensor.endswith("e_score_correction_bias")
            assert torch.equal(values, expected.initial[tensor]) == is_bias, f"{name}: {tensor} shows nothing"


def test_everything_on_a_rank_is_offloaded(results: Results) -> None:
    for name, (case, ranks) in results.items():
        for result in ranks:
            offload = result["offload"]
            assert offload["missing"] == [], name
            assert offload["owners are unique"], name
            assert offload["not exported"] == [], name
            if case.actor.get("expert_model_parallel_size", 1) > 1 and case.actor.get(
                "use_distributed_optimizer", True
            ):
                assert offload["expert buffers"] >= 1, name


def test_multi_token_prediction_learns(results: Results, references: References, paths: dict[str, Path]) -> None:
    """Its losses are those of transformers' own layers with the same tensors, and its weights move."""
    for name, (case, ranks) in results.items():
        num_layers = MODELS[case.model][1].get("mtp_layers", 0)
        logged = [result["mtp losses"] for result in ranks if result["mtp losses"]]
        assert bool(logged) == bool(num_layers), name
        if num_layers:
            batch = {**make_batch(), "mask": MASK.expand(BATCH, -1)}
            expected = mtp_losses(paths[case.model], reference_model(case.model), batch)
            assert all(math.isfinite(result["all masked"]) for result in ranks), name
            assert all(losses == pytest.approx(expected, abs=1e-4) for losses in logged), name
            moved = ranks[0]["after a free step"]
            initial = references[case.model].initial
            assert len([tensor for tensor in moved if not tensor.endswith("bias")]) > 10 * num_layers, name
            assert [tensor for tensor in moved if torch.equal(moved[tensor], initial[tensor])] == [], name


def test_router_bias_is_updated_by_counts(results: Results, references: References) -> None:
    """By the update rate towards experts that got fewer tokens than the mean; the decoder's counts by transformers."""
    for name, (case, ranks) in results.items():
        if not case.model.startswith("deepseek_v3"):
            continue
        counts = count_tokens(case.model)
        assert counts, name
        for layer, count in counts.items():
            tensor = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            expected = references[case.model].initial[tensor] + 1e-3 * torch.sign(count.mean() - count)
            close(ranks[0]["after a free step"][tensor], expected, f"{name}: {tensor}", 1e-7)


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


def test_half_precision_and_refusals(launched: Callable[[int], Any], paths: dict[str, Path]) -> None:
    for found in (rank[FURTHER] for rank in launched(2)):
        bias = found["bias"]
        assert bias["dtypes"] == {"torch.float32"}
        assert bias["stays where it is"]
        assert bias["reference"]
        assert all(moved == pytest.approx(1e-3, abs=1e-6) for moved in bias["moved by"])
        assert "sequence_parallel" in found["experts without sequence parallel"]
        assert "expert_tensor_parallel_size: 1 with TP 2" in found["experts cut otherwise"]
        assert "context_parallel_size: 2" in found["context"]
        assert "noop_layers: [1, 1] names a position twice" in found["positions"]
        whole = sum(tensor.numel() for tensor in read_canonical(paths["deepseek_v3"]).values())
        assert found["experts without sequence parallel, weights only"] < whole
        assert found["context, weights only"] > 0.99 * whole
