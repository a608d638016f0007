"""Counts, biases and auxiliary losses of routers are the same for any padding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.ports import Batch
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.megatron_models import EP2, PP2, SP2, loaded
from tests.zoo.padded_batches import LENGTHS, batches
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import Zoo

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, Values] = {
    "tp2, recomputed": {**SP2, **FULL},
    "pp2": {**PP2, "num_layers_in_last_pipeline_stage": 1},
    "ep2": EP2,
}
TOP_K = 4


def step(path: Path, rows: Mapping[str, Batch], settings: Values) -> list[tuple[Any, torch.Tensor]]:
    """Return for each batch loss and norm, and tokens [routers, experts] and then biases after a
    step from 0.
    """
    from megatron.core import parallel_state

    def loss(micro_batch: Batch, log_probs: torch.Tensor) -> torch.Tensor:
        return -(log_probs * micro_batch["weights"]).sum(1).mean()

    def count(*args: Any, **kwargs: Any) -> None:
        counts.append(torch.stack([router.local_tokens_per_expert for router in routers]))
        finalize(*args, **kwargs)

    results = []
    with loaded(path, seq_length=24, **settings) as run:
        run.engine.optimizer.set_learning_rate(0.0)
        routers = [
            module
            for chunk in run.actor.chunks
            for module in chunk.modules()
            if hasattr(module, "expert_bias")
        ]
        config = run.actor.transformer_config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, count
        for batch in rows.values():
            counts = []
            for router in routers:
                router.expert_bias.zero_()
            report = run.engine.train_step(share_of(run.engine, batch), loss)
            dist.all_reduce(counts[0], group=parallel_state.get_tensor_and_data_parallel_group())
            state = torch.cat([*counts, torch.stack([router.expert_bias for router in routers])])
            results.append(((report["loss"], report["grad_norm"]), state))
    return results


@on_engines(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_micro_batches_change_neither_counts_nor_biases(zoo: Zoo, layout: str) -> None:
    ways = {name: batches()[name] for name in ("right", "left", "packed")}
    path = zoo.path("deepseek_v3", mtp_layers=1)
    ((loss, _), state), *others = step(path, ways, {**LAYOUTS[layout], "micro_batch_size": 2})
    # an MTP layer has nothing to predict from the last token of a sequence
    counts, biases = state.chunk(2)
    assert {*counts.sum(1).tolist()} <= {
        TOP_K * sum(LENGTHS),
        TOP_K * (sum(LENGTHS) - len(LENGTHS)),
    }
    assert biases.any()
    for (other_loss, _), other in others:
        assert torch.equal(state, other)
        assert other_loss == pytest.approx(loss, abs=1e-5)


@on_engines(1)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_auxiliary_losses_ignore_padding(zoo: Zoo, kind: str) -> None:
    """Also in a micro batch of padding: they divide by its number of tokens."""
    right = batches()["right"]
    alone = {
        name: values[:1, : LENGTHS[0]] for name, values in right.items() if name != "temperature"
    }
    padded = {
        name: torch.cat([right[name][:1], torch.zeros_like(right[name][:1])]) for name in alone
    }
    losses = {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": 3.0,
        "moe_z_loss_coeff": 1.0,
    }
    settings = {"overrides": {"transformer": losses}}
    path = zoo.path("deepseek_v3", mtp_layers=1)
    ((expected, _), (figures, _)) = step(path, {"alone": alone, "padded": padded}, settings)
    # means of two micro batches
    assert [2 * figure for figure in figures] == pytest.approx(expected, rel=1e-4)
