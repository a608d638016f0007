"""Megatron with experts, latent attention, MTP and uneven pipelines, against transformers.

Two features that transformers lacks in training are computed here: a router bias updated by token
counts, and the loss of multi-token prediction (MTP).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from packaging.version import Version

from hybrid_engine.errors import BatchError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.core_versions import INSTALLED
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.zoo import padded_batches
from tests.zoo.families import YARN
from tests.zoo.megatron_models import (
    EP2,
    OVERLAP,
    PP2,
    SP2,
    VPP2,
    check_padding,
    check_training,
    loaded,
    make_batch,
    negative_log_likelihood,
    whole_weights,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import TinyModel, Zoo, mtp_losses, read_canonical

WINDOWS = {"use_sliding_window": True, "sliding_window": 4}  # shorter than the sequences
MODELS: dict[str, TinyModel] = {
    "qwen3_moe": TinyModel("qwen3_moe"),
    "qwen3_moe, some layers dense": TinyModel(
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            **WINDOWS,
        },
    ),
    "qwen2_moe": TinyModel("qwen2_moe", WINDOWS),
    "mixtral": TinyModel("mixtral"),
    "deepseek_v2": TinyModel("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v2, plain queries, groups": TinyModel(
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": TinyModel("deepseek_v3"),
    "deepseek_v3, three experts, yarn": TinyModel(
        "deepseek_v3", {"num_experts_per_tok": 3, "rope_parameters": YARN}
    ),
    "deepseek_v3, one mtp layer": TinyModel("deepseek_v3", {"mtp_layers": 1}),
    "deepseek_v3, two mtp layers": TinyModel("deepseek_v3", {"mtp_layers": 2}),
    "qwen3, three layers": TinyModel("qwen3", {"num_hidden_layers": 3}),
    "qwen3, four layers, tied": TinyModel(
        "qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}
    ),
}


ETP1 = {"expert_tensor_parallel_size": 1}
ETP2 = {"expert_tensor_parallel_size": 2}
FIRST1 = {"num_layers_in_first_pipeline_stage": 1}
LAST1 = {"num_layers_in_last_pipeline_stage": 1}
PLAIN = {"use_distributed_optimizer": False}

# Number of ranks -> name -> model, actor settings; the installed megatron-core decides about the
# last cases.
CASES: dict[int, dict[str, tuple[str, Values]]] = {
    2: {
        "qwen3_moe ep2": ("qwen3_moe", EP2),
        "qwen3_moe tp2 etp2": ("qwen3_moe", SP2),
        "qwen3_moe tp2 ep2 etp1, plain optimizer": ("qwen3_moe", {**SP2, **EP2, **ETP1, **PLAIN}),
        "qwen3_moe dense layers, ep2, plain optimizer": (
            "qwen3_moe, some layers dense",
            {**EP2, **PLAIN},
        ),
        "qwen2_moe tp2 ep2 etp1": ("qwen2_moe", {**SP2, **EP2, **ETP1}),
        "mixtral pp2": ("mixtral", PP2),
        "mixtral ep2, overlap": ("mixtral", {**EP2, **OVERLAP}),
        "deepseek_v2 tp2": ("deepseek_v2", SP2),
        "deepseek_v2, plain queries tp2 ep2 etp1": (
            "deepseek_v2, plain queries, groups",
            {**SP2, **EP2, **ETP1},
        ),
        "deepseek_v3 tp2": ("deepseek_v3", SP2),
        "deepseek_v3 pp2, first 1": ("deepseek_v3, three experts, yarn", {**PP2, **FIRST1}),
        "deepseek_v3 mtp tp2 ep2 etp1": ("deepseek_v3, two mtp layers", {**SP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2, last 1": ("deepseek_v3, two mtp layers", {**PP2, **LAST1}),
        "deepseek_v3 mtp pp2, layout": (
            "deepseek_v3, two mtp layers",
            {**PP2, "pipeline_model_parallel_layout": "Ettt|mmL"},
        ),
        "qwen3 pp2, first 1": ("qwen3, three layers", {**PP2, **FIRST1}),
        "qwen3 pp2, both ends count": (
            "qwen3, four layers, tied",
            {
                **PP2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        "qwen3 pp2 vpp2, layout": (
            "qwen3, four layers, tied",
            {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|L"},
        ),
        "qwen3 pp2 vpp2, ends do nothing": (
            "qwen3, four layers, tied",
            {**VPP2, "noop_layers": (0, 4, 6, 7)},
        ),
        "deepseek_v3 pp2, middle does nothing": ("deepseek_v3", {**PP2, "noop_layers": (1,)}),
    },
    4: {
        "qwen3_moe tp2 ep2 etp2": ("qwen3_moe", {**SP2, **EP2, **ETP2}),
        "mixtral tp2 pp2 ep2 etp1": ("mixtral", {**SP2, **PP2, **EP2, **ETP1}),
        "deepseek_v3 mtp pp2 ep2, last 1": ("deepseek_v3, two mtp layers", {**PP2, **EP2, **LAST1}),
        "deepseek_v3 mtp pp4, mtp by itself": (
            "deepseek_v3, two mtp layers",
            {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|tt|mm|L"},
        ),
        "deepseek_v3 tp4 ep2 etp2": (
            "deepseek_v3",
            {**SP2, "tensor_model_parallel_size": 4, **EP2, **ETP2, **OVERLAP},
        ),
        "qwen3 pp4, nothing in the middle": (
            "qwen3, three layers",
            {"pipeline_model_parallel_size": 4, "noop_layers": (1, 3, 4), **FIRST1, **LAST1},
        ),
    },
}
if Version("0.19.0") <= INSTALLED:
    CASES[2] |= {
        "qwen3 HybridModel pp2": (
            "qwen3, three layers",
            {**PP2, "hybrid_layer_pattern": "*-*|-*-"},
        ),
        "qwen3 HybridModel pp2 vpp2": (
            "qwen3, four layers, tied",
            {**PP2, "hybrid_layer_pattern": "*-|*|-*-|*-"},
        ),
        "qwen3_moe HybridModel tp2 ep2 etp1": (
            "qwen3_moe",
            {**SP2, **EP2, **ETP1, "hybrid_layer_pattern": "*E*E"},
        ),
        "deepseek_v2 HybridModel tp2": ("deepseek_v2", {**SP2, "hybrid_layer_pattern": "+-+E+E"}),
    }
LAYOUTS = {name: case for cases in CASES.values() for name, case in cases.items()}
# Cases on two ranks that also read batches padded on either side, and packed batches.
PADDED = ("mixtral ep2, overlap", "deepseek_v2 tp2", "deepseek_v3 pp2, first 1")
BIASED = {
    num_ranks: [name for name, (model, _) in cases.items() if model.startswith("deepseek_v3")]
    for num_ranks, cases in CASES.items()
}
UPDATE_RATE = 1e-3
# Labels that MTP learns from; its loss is still the mean over all labels.
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0]).expand(4, 12)


@on_engines(CASES, timeout=600)
def test_training_equals_transformers(zoo: Zoo, case: str) -> None:
    model, actor = LAYOUTS[case]
    check_training(zoo.saved(MODELS[model]), actor)


@on_engines(2, timeout=600)
@pytest.mark.parametrize("name", PADDED)
def test_padding_and_packing_do_not_change_results(zoo: Zoo, name: str) -> None:
    """Also with latent attention."""
    model, actor = LAYOUTS[name]
    check_padding(zoo.saved(MODELS[model]), MODELS[model].build(), actor)


@on_engines(BIASED, timeout=600)
def test_router_biases_and_mtp_layers_learn(zoo: Zoo, case: str) -> None:
    """Compare a step with token counts and MTP losses, and then take one without any label."""
    name, actor = LAYOUTS[case]
    tiny = MODELS[name]
    path = zoo.saved(tiny)
    num_mtp_layers = tiny.changes.get("mtp_layers", 0)
    model = tiny.build()
    initial = read_canonical(path)
    biases = _updated_biases(model, initial)
    assert biases
    with loaded(path, **actor) as run:
        engine = run.engine
        batch = share_of(engine, {**make_batch(), "mask": MASK})
        by_rank = of_all_ranks(_mtp_losses_of_step(engine, batch))
        weights = whole_weights(engine.model.weights)
        report = engine.train_step({**batch, "mask": 0 * batch["mask"]}, negative_log_likelihood)
        parameters = engine.model.weights.model.named_parameters()
        gradients = [
            parameter.main_grad.abs().max().item()
            for name, parameter in parameters
            if "mtp." in name
        ]
    for name, expected in biases.items():
        torch.testing.assert_close(weights[name], expected, atol=1e-7, rtol=0)
    if not num_mtp_layers:
        return
    expected_losses = mtp_losses(path, model, {**make_batch(), "mask": MASK})
    logged = [losses for losses in by_rank if losses]  # on the last stage
    assert logged
    assert all(losses == pytest.approx(expected_losses, abs=1e-4) for losses in logged)
    trained = [name for name in weights if not run.table.is_served(name)]
    assert len([name for name in trained if not name.endswith("bias")]) > 10 * num_mtp_layers
    assert not [name for name in trained if torch.equal(weights[name], initial[name])]
    assert math.isfinite(report["grad_norm"])
    assert {largest for of_rank in of_all_ranks(gradients) for largest in of_rank} == {0.0}


def _updated_biases(model: Any, initial: TensorDict) -> TensorDict:
    """Return router biases after a step: towards experts below the mean of tokens, counted in
    transformers.
    """
    biases = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"

            def update(
                _gate: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...], name: str = name
            ) -> None:
                count = torch.bincount(outputs[2].flatten(), minlength=outputs[0].shape[-1]).float()
                biases[name] = initial[name] + UPDATE_RATE * torch.sign(count.mean() - count)

            block.mlp.gate.register_forward_hook(update)
    with torch.no_grad():
        model(make_batch()["tokens"])
    return biases


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


@on_engines(2, timeout=600)
@pytest.mark.parametrize("layers", ["one mtp layer", "two mtp layers"])
def test_mtp_does_not_learn_padding_or_across_sequences(zoo: Zoo, layers: str) -> None:
    """Only one MTP layer supports packing."""
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

    is_refused = layers == "two mtp layers"
    batches = padded_batches.batches()
    losses = {}
    with loaded(zoo.saved(MODELS[f"deepseek_v3, {layers}"]), **SP2) as run:
        run.actor.transformer_config.moe_router_bias_update_rate = 0.0
        run.engine.optimizer.set_learning_rate(0.0)  # all arrangements see the same weights
        for arrangement in ("right", "left", "packed"):
            # One micro batch, because Megatron takes the mean per micro batch.
            engine = TrainEngine(
                run.actor, run.table, micro_batch_size=len(batches[arrangement]["tokens"])
            )
            refusal = pytest.raises(BatchError, match="2 MTP layers")
            with refusal if is_refused and arrangement == "packed" else nullcontext():
                losses[arrangement] = _mtp_losses_of_step(engine, batches[arrangement])
    assert losses["left"] == losses["right"]
    assert min(losses["right"]) > 0
    assert is_refused or losses["packed"] == pytest.approx(losses["right"], abs=1e-5)


@on_engines(2, timeout=600)
def test_router_bias_stays_float32_at_its_address_in_bfloat16_training(zoo: Zoo) -> None:
    with loaded(zoo.path("deepseek_v3"), params_dtype="bfloat16", **EP2) as run:
        weights = run.engine.model.weights
        biases = {
            name: bias
            for name, bias in weights.model.named_weights()
            if name.endswith("expert_bias")
        }
        before = {name: (bias.clone(), bias.data_ptr()) for name, bias in biases.items()}
        run.engine.train_step(share_of(run.engine, make_batch()), negative_log_likelihood)
        weights.prepare()
        assert biases
        for name, bias in biases.items():
            values, address = before[name]
            assert bias.data_ptr() == address  # where peers read it
            assert float((bias - values).abs().max()) == pytest.approx(UPDATE_RATE, abs=1e-6)
        for chunk in run.actor.chunks:
            routers = [
                buffer for name, buffer in chunk.module.named_buffers() if ".router." in name
            ]
            assert {buffer.dtype for buffer in routers} == {torch.float32}
