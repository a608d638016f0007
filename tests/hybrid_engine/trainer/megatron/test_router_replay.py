"""Routers of Megatron models that take the experts of a batch, against transformers with the same
experts.

Every token has random experts in every layer, so that one that is shifted, or of another layer,
changes its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packaging.version import Version

from hybrid_engine.errors import BatchError
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches import pack_rows
from tests.harness.core_versions import INSTALLED
from tests.harness.errors import violated
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.megatron_models import (
    ATOL,
    EP2,
    PP2,
    SP2,
    VPP2,
    loaded,
    negative_log_likelihood,
    reference_of,
    running,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import TinyModel, Zoo, label_log_probs, token_batch

MODELS: dict[str, TinyModel] = {
    "qwen3_moe": TinyModel("qwen3_moe", {"num_hidden_layers": 4}),
    "qwen3_moe, some layers dense": TinyModel(
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": TinyModel("deepseek_v3"),
    "deepseek_v3, one mtp layer": TinyModel("deepseek_v3", {"mtp_layers": 1}),
    "qwen3": TinyModel("qwen3"),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

# name -> (model, layout)
CASES: dict[str, tuple[str, Values]] = {
    "ep2, dense layers": ("qwen3_moe, some layers dense", EP2),
    "tp2 ep2 etp1": ("qwen3_moe", {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    "tp2, experts recomputed": ("qwen3_moe", {**SP2, **MOE}),
    "pp2 vpp2": ("qwen3_moe", {**VPP2}),
    "pp2 vpp2, layers recomputed": ("qwen3_moe", {**VPP2, **FULL}),
    "pp2 vpp2, dense layers": ("qwen3_moe, some layers dense", {**VPP2}),
    "pp2, groups, mtp": (
        "deepseek_v3, one mtp layer",
        {**PP2, "num_layers_in_last_pipeline_stage": 1},
    ),
    "pp2, groups, middle does nothing": ("deepseek_v3", {**PP2, "noop_layers": (1,)}),
}
if Version("0.19.0") <= INSTALLED:
    CASES["HybridModel pp2"] = "qwen3_moe", {**PP2, "hybrid_layer_pattern": "*E*E*|E*E"}
NUM_SEQUENCES, LENGTH = 4, 8
PADDING = 6


def batch_of(num_layers: int, num_experts: int, top_k: int) -> TensorDict:
    """Return sequences whose tokens have random experts, except a few tokens without."""
    generator = torch.Generator().manual_seed(11)
    batch = token_batch(3, NUM_SEQUENCES, LENGTH)
    scores = torch.rand(NUM_SEQUENCES, LENGTH, num_layers, num_experts, generator=generator)
    experts = scores.argsort(-1)[..., :top_k].to(torch.int16)
    experts[0, 2] = experts[3, -1] = -1
    return {**batch, "routed_experts": experts}


def batch_for(model: str) -> TensorDict:
    config = MODELS[model].build().config
    num_experts = getattr(config, "n_routed_experts", None) or config.num_experts
    return batch_of(config.num_hidden_layers, num_experts, config.num_experts_per_tok)


def ways_of(batch: Batch) -> dict[str, TensorDict]:
    """Return the sequences in rows without padding, padded on the left, and packed."""
    empty = {"tokens": 0, "labels": 0, "routed_experts": 0}
    padded = {}
    for name, values in batch.items():
        padding = values.new_full((NUM_SEQUENCES, PADDING, *values.shape[2:]), empty[name])
        padded[name] = torch.cat([padding, values], 1)
    columns = torch.arange(LENGTH + PADDING)
    padded["attention_mask"] = (columns >= PADDING).long().expand(NUM_SEQUENCES, -1).contiguous()
    packed = pack_rows(padded, 2 * LENGTH, multiple_of=2).batch
    return {"plain": dict(batch), "left": padded, "packed": packed}


def by_token(values: torch.Tensor, way: str) -> torch.Tensor:
    """Return values of all sequences, one after the other, from those of a way."""
    return (values[:, PADDING:] if way == "left" else values).flatten()


@dataclass(frozen=True)
class Expected:
    """Results of transformers."""

    log_probs: torch.Tensor
    own: torch.Tensor
    loss: float
    norm: float


def with_transformers(model: str) -> Expected:
    module = MODELS[model].build()
    batch = batch_for(model)
    with torch.no_grad():
        own = label_log_probs(module(batch["tokens"]).logits, batch["labels"])
    for number, layer in enumerate(module.model.layers):
        router = getattr(layer.mlp, "gate", None)
        if router is not None:
            experts = batch["routed_experts"][:, :, number].flatten(0, 1).long()
            router.register_forward_hook(_choosing(experts, module.config))
    log_probs = label_log_probs(module(batch["tokens"]).logits, batch["labels"])
    loss = -log_probs.mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
    return Expected(log_probs.detach().flatten(), own.flatten(), loss.item(), norm.item())


def _choosing(experts: torch.Tensor, config: Any) -> Callable[..., Any]:
    """Return a hook that replaces a router's selection where `experts` [tokens, k] has any."""
    is_sigmoid = config.model_type == "deepseek_v3"

    def hook(
        _router: torch.nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = outputs
        scores = logits.float().sigmoid() if is_sigmoid else logits.float().softmax(-1)
        taken = scores.gather(1, experts.clamp(min=0))
        if config.norm_topk_prob:
            taken = taken / taken.sum(-1, keepdim=True)
        if is_sigmoid:
            taken = taken * config.routed_scaling_factor
        has_experts = (experts >= 0).all(-1, keepdim=True)
        return logits, taken.where(has_experts, weights), experts.where(has_experts, chosen)

    return hook


@on_engines(2, timeout=600)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_transformers_with_the_same_experts(zoo: Zoo, name: str) -> None:
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    model, layout = CASES[name]
    expected = with_transformers(model)
    assert (expected.log_probs - expected.own).abs().max() > 0.1
    path = zoo.saved(MODELS[model])
    with loaded(path, seq_length=16, **layout) as run:
        engine = run.engine
        settings = run.actor.transformer_config
        settings.moe_router_bias_update_rate = settings.mtp_loss_scaling_factor = 0.0

        def check(engine: Any, rows: TensorDict, values: torch.Tensor, way: str) -> None:
            log_probs = engine.data_parallel.gather(engine.log_probs(share_of(engine, rows)))
            torch.testing.assert_close(
                by_token(log_probs, way),
                values,
                atol=ATOL,
                rtol=0,
                msg=lambda message: f"{way}: {message}",
            )

        batch = batch_for(model)
        for way, rows in ways_of(batch).items():
            check(engine, rows, expected.log_probs, way)
        check(
            engine,
            {key: batch[key] for key in ("tokens", "labels")},
            expected.own,
            "the routers' own selection",
        )
        # A reference is another policy, which selects experts itself.
        reference = reference_of(run, path)
        copy_weights(engine.model, reference.model)
        check(reference, batch, expected.own, "reference")
        engine.optimizer.set_learning_rate(0.0)
        for _ in range(2):
            report = engine.train_step(share_of(engine, batch), negative_log_likelihood)
            assert report["loss"] == pytest.approx(expected.loss, abs=1e-4)
            assert report["grad_norm"] == pytest.approx(expected.norm, rel=1e-3)


@on_engines(1)
def test_experts_that_routers_cannot_take_are_refused(zoo: Zoo) -> None:
    batch = batch_for("qwen3_moe")
    experts = batch["routed_experts"]
    for model, routed, code in (
        ("qwen3_moe", experts[:, :, 1:], "wrong-shape"),  # a layer too few
        ("qwen3_moe", experts + 1, "out-of-range"),
        ("qwen3_moe", experts.float(), "wrong-shape"),
        ("qwen3", experts, "replay-unsupported"),  # a model without experts
    ):
        refused = violated(BatchError, ("routed_experts", code))
        with running(zoo.saved(MODELS[model])) as run, refused:
            share_of(run.engine, {**batch, "routed_experts": routed})


@on_engines(1)
def test_the_replay_of_a_user_stays_where_groups_have_scores(zoo: Zoo) -> None:
    """Record with Megatron's own RouterReplay, and replay other experts with it."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    overrides = {"transformer": {"moe_enable_routing_replay": True}}
    with loaded(zoo.path("deepseek_v3"), overrides=overrides) as run:
        batch = share_of(run.engine, token_batch(3, 1, LENGTH))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        log_probs = run.engine.log_probs(batch)
        recorded = [experts.clone() for experts in RouterReplay.get_recorded_data()]
        assert [tuple(experts.shape) for experts in recorded] == [(LENGTH, 4)] * 2
        RouterReplay.set_replay_data([(experts + 1) % 8 for experts in recorded])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert not torch.allclose(log_probs, run.engine.log_probs(batch), atol=1e-3)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        num_layers = run.engine.limits.routing.num_layers
        experts = torch.tensor([[7, 2, 5, 0]], dtype=torch.int16).expand(1, LENGTH, num_layers, 4)
        run.engine.log_probs({**batch, "routed_experts": experts.contiguous()})
        assert all((data == experts[0, :, 0]).all() for data in RouterReplay.get_recorded_data())
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_router_replay_instances()
