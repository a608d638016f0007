"""Steps of `TrainEngine` in half precision, with references and with recomputation.

backends/megatron/test_dense.py compares steps in every layout with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import BatchError, HybridEngineError, ReshardError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.batch_checks import own_share
from hybrid_engine.trainer.batches.image_rows import IMAGES, ImageRows
from tests.harness.errors import refused, violated
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.megatron_models import (
    TP2,
    loaded,
    make_batch,
    negative_log_likelihood,
    reference_of,
    running,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import Zoo


@on_engines(2)
def test_ranks_report_the_same_names_or_none(zoo: Zoo) -> None:
    from hybrid_engine.backends.megatron.internals import process_groups

    with loaded(zoo.path("qwen3")) as run:
        share = share_of(run.engine, make_batch())
        name = f"of rank {run.engine.data_parallel.rank}"
        before = run.engine.log_probs(share)
        with pytest.raises(HybridEngineError) as caught:
            run.engine.train_step(share, lambda _batch, log_probs: (-log_probs.mean(), {name: 1.0}))
        # the code on the last pipeline stage, and on the other ranks
        assert caught.value.code in ("other-names-reported", "rank-failed")
        assert torch.equal(run.engine.log_probs(share), before)
        assert not [
            group.group_desc
            for group in process_groups()
            if group is not None and "GLOO" in group.group_desc
        ]
        report = run.engine.train_step(share, lambda _batch, log_probs: (-log_probs.mean(), {}))
        assert report.keys() == {"grad_norm", "learning_rate", "skipped"}


@on_engines(2)
def test_a_reference_does_not_change_when_the_actor_is_trained(zoo: Zoo) -> None:
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    batch = make_batch()
    path = zoo.path("qwen3")
    with loaded(path, **TP2, params_dtype="bfloat16") as run:
        log_probs = run.engine.log_probs(batch)
        reference = reference_of(run, path)
        copy_weights(run.engine.model, reference.model)
        assert torch.equal(reference.log_probs(batch), log_probs)
        run.engine.optimizer.set_learning_rate(1e-2)  # large enough to change bfloat16 weights
        run.engine.train_step(batch, negative_log_likelihood)
        assert torch.equal(reference.log_probs(batch), log_probs)
        assert not torch.equal(run.engine.log_probs(batch), log_probs)
        assert (reference.model.version, run.engine.model.version) == (0, 1)
        assert {item.kind for item in reference.model.offload_items()} == {"param"}


@on_engines(2)
def test_an_overflow_in_float16_skips_the_step(zoo: Zoo) -> None:
    """The loss scale starts at 2**32."""
    batch = make_batch()
    with loaded(zoo.path("qwen3"), **TP2, params_dtype="float16") as run:
        before = run.engine.log_probs(batch)
        assert run.engine.train_step(batch, negative_log_likelihood)["skipped"] == 1
        assert run.engine.model.version == 0
        assert torch.equal(before, run.engine.log_probs(batch))


@on_engines(2)
def test_batches_that_do_not_fit_are_refused(zoo: Zoo) -> None:
    with running(zoo.path("qwen3"), **TP2, micro_batch_size=3) as run:
        with violated(BatchError, ("tokens", "not-divisible")):
            run.engine.log_probs(make_batch())
        batch = {**make_batch(), IMAGES: ImageRows([{"pixel_values": torch.zeros(1, 2)}] * 4)}
        with violated(BatchError, ("images", "images-unsupported")):
            own_share(batch, run.engine.limits)
        dist.barrier()


FULL = {"recompute_granularity": "full"}
RECOMPUTED: dict[str, Values] = {
    "all layers": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    "a layer": {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}


@dataclass(frozen=True)
class Stepped:
    """Result of a step on one micro batch.

    Attributes:
        report: figures of the step.
        gradients: by parameter.
        kept_nbytes: bytes that autograd kept during the forward pass.
    """

    report: dict[str, float]
    gradients: TensorDict
    kept_nbytes: int


def step(path: Path, settings: Values) -> Stepped:
    kept = []
    ends = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def loss(batch: Any, log_probs: torch.Tensor) -> Any:
        ends.append(len(kept))  # the forward pass ends here
        return negative_log_likelihood(batch, log_probs)

    with running(path, **TP2, micro_batch_size=4, **settings) as run:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            report = run.engine.train_step(make_batch(), loss)
        gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in run.engine.model.weights.model.named_parameters()
            if parameter.requires_grad
        }
    return Stepped(report, gradients, sum(kept[: ends[0]]))


@on_engines(2)
@pytest.mark.parametrize("base", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
def test_recomputation_changes_no_bit(zoo: Zoo, base: Values) -> None:
    """Adapters alone require gradients; the embedding and later weights then do not."""
    path = zoo.path("qwen3")
    plain = step(path, base)
    assert any(gradient.any() for gradient in plain.gradients.values())
    for name, settings in RECOMPUTED.items():
        recomputed = step(path, {**base, **settings})
        assert recomputed.report == plain.report, name
        assert recomputed.gradients.keys() == plain.gradients.keys(), name
        assert all(map(torch.equal, recomputed.gradients.values(), plain.gradients.values())), name
        assert recomputed.kept_nbytes < plain.kept_nbytes, name


def test_scores_have_no_dropout_and_need_the_weights_in_their_place(job: None, zoo: Zoo) -> None:
    dropout = {"transformer": {"hidden_dropout": 0.5}}
    with running(zoo.path("qwen3"), overrides=dropout) as run:
        run.engine.train_step(make_batch(), negative_log_likelihood)
        scores = [run.engine.log_probs(make_batch()) for _ in range(2)]
        assert torch.equal(*scores)
        run.actor.chunks[0].to(torch.float64)
        with refused(ReshardError, "parameters-moved"):
            run.engine.log_probs(make_batch())
