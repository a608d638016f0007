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

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import BatchError, HybridEngineError, ReshardError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.batch_checks import own_share
from hybrid_engine.trainer.batches.image_rows import IMAGES, ImageRows
from tests.harness.errors import has_code, violations_of
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.values import Values
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, reference_of, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import save_model, token_batch

BATCH = 4
LENGTH = 12

TP2 = {"tensor_model_parallel_size": 2}


def make_batch() -> TensorDict:
    """Return a whole batch; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, BATCH, LENGTH)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


def report_names(path: Path) -> dict[str, float]:
    """Refuse losses with another name on each rank; return the report of a loss with none."""
    from hybrid_engine.backends.megatron.internals import process_groups

    with running(path, ActorConfig(**DENSE_FLOAT32)) as run:
        load_canonical(run, path)
        share = share_of(run.engine, make_batch())
        name = f"of rank {run.engine.data_parallel.rank}"
        before = run.engine.log_probs(share)
        with pytest.raises(HybridEngineError) as caught:
            run.engine.train_step(share, lambda _batch, log_probs: (-log_probs.mean(), {name: 1.0}))
        # the code on the last pipeline stage, and on the other ranks
        assert caught.value.code in ("other-names-reported", "rank-failed")
        assert torch.equal(run.engine.log_probs(share), before)
        assert not [group.group_desc for group in process_groups() if group is not None and "GLOO" in group.group_desc]
        return run.engine.train_step(share, lambda _batch, log_probs: (-log_probs.mean(), {}))


@dataclass(frozen=True)
class HalfPrecision:
    """Results of one rank in bfloat16, with a reference made before the step.

    Attributes:
        log_probs, trained: of the actor, before and after the step.
        reference, later: of the reference, before and after the step.
        versions: of the reference and of the actor.
        reference_kinds: kinds of the reference's state that can be offloaded.
    """

    log_probs: torch.Tensor
    reference: torch.Tensor
    trained: torch.Tensor
    later: torch.Tensor
    versions: tuple[int, int]
    reference_kinds: set[str]


def run_bfloat16(path: Path) -> HalfPrecision:
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    batch = make_batch()
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "bfloat16"})) as run:
        load_canonical(run, path)
        log_probs = run.engine.log_probs(batch)
        reference = reference_of(run, path)
        copy_weights(run.engine.model, reference.model)
        frozen = reference.log_probs(batch)
        run.engine.optimizer.set_learning_rate(1e-2)  # large enough to change bfloat16 weights
        run.engine.train_step(batch, negative_log_likelihood)
        return HalfPrecision(
            log_probs=log_probs,
            reference=frozen,
            trained=run.engine.log_probs(batch),
            later=reference.log_probs(batch),
            versions=(reference.model.version, run.engine.model.version),
            reference_kinds={item.kind for item in reference.model.offload_items()},
        )


@dataclass(frozen=True)
class Overflow:
    """Result of a step in float16; the loss scale starts at 2**32."""

    skipped: float
    version: int
    weights_stay: bool


def run_float16(path: Path) -> Overflow:
    batch = make_batch()
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "float16"})) as run:
        load_canonical(run, path)
        before = run.engine.log_probs(batch)
        report = run.engine.train_step(batch, negative_log_likelihood)
        return Overflow(report["skipped"], run.engine.model.version, torch.equal(before, run.engine.log_probs(batch)))


def refuse_uneven_batch(path: Path) -> list[tuple[str, str]]:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "micro_batch_size": 3})) as run:
        with pytest.raises(BatchError) as caught:
            run.engine.log_probs(make_batch())
        dist.barrier()
        return violations_of(caught.value)


def refuse_images(path: Path) -> list[tuple[str, str]]:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        batch = {**make_batch(), IMAGES: ImageRows([{"pixel_values": torch.zeros(1, 2)}] * BATCH)}
        with pytest.raises(BatchError) as caught:
            own_share(batch, run.engine.limits)
        dist.barrier()
        return violations_of(caught.value)


FULL = {"recompute_granularity": "full"}
RECOMPUTED: dict[str, Values] = {
    "nothing": {},
    "all layers": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    "a layer": {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}


@dataclass(frozen=True)
class Recomputed:
    """Result of a step on one micro batch.

    Attributes:
        report: figures of the step.
        gradients: by parameter.
        kept_nbytes: bytes that autograd kept during the forward pass.
    """

    report: dict[str, float]
    gradients: TensorDict
    kept_nbytes: int


def run_recomputed(path: Path, base: Values) -> dict[str, Recomputed]:
    return {name: _run_recomputed(path, {**base, **settings}) for name, settings in RECOMPUTED.items()}


def _run_recomputed(path: Path, settings: Values) -> Recomputed:
    kept: list[int] = []
    ends: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def loss(batch: Any, log_probs: torch.Tensor) -> Any:
        ends.append(len(kept))  # the forward pass ends here
        return negative_log_likelihood(batch, log_probs)

    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "micro_batch_size": BATCH, **settings})) as run:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            report = run.engine.train_step(make_batch(), loss)
        gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in run.engine.model.weights.model.named_parameters()
            if parameter.requires_grad
        }
    return Recomputed(report, gradients, sum(kept[: ends[0]]))


def test_scores_have_no_dropout_and_need_the_weights_in_their_place(job: None, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen3")
    dropout = {"transformer": {"hidden_dropout": 0.5}}
    with running(path, ActorConfig(**DENSE_FLOAT32, overrides=dropout)) as run:
        run.engine.train_step(make_batch(), negative_log_likelihood)
        scores = [run.engine.log_probs(make_batch()) for _ in range(2)]
        assert torch.equal(*scores)
        run.actor.chunks[0].to(torch.float64)
        with pytest.raises(ReshardError, check=has_code("parameters-moved")):
            run.engine.log_probs(make_batch())


RECOMPUTING = {"recomputed": {}, "recomputed, adapters": {"lora": {"rank": 4}}}
FURTHER = {
    "bfloat16": run_bfloat16,
    "float16": run_float16,
    "uneven": refuse_uneven_batch,
    "images": refuse_images,
    "names": report_names,
}


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Results of two ranks."""
    path = save_model(tmp_path_factory.mktemp("model"), "qwen3")
    calls: dict[str, Call] = {name: (function, (path,)) for name, function in FURTHER.items()}
    calls |= {name: (run_recomputed, (path, base)) for name, base in RECOMPUTING.items()}
    return engines.launch_in_turn(2, calls)


def test_a_loss_without_report_has_the_figures_of_the_step(outcomes: Outcomes) -> None:
    assert all(report.keys() == {"grad_norm", "learning_rate", "skipped"} for report in outcomes["names"])


def test_a_reference_does_not_change_when_the_actor_is_trained(outcomes: Outcomes) -> None:
    for results in outcomes["bfloat16"]:
        assert torch.equal(results.reference, results.log_probs)
        assert torch.equal(results.later, results.reference)
        assert not torch.equal(results.trained, results.log_probs)
        assert results.versions == (0, 1)
        assert results.reference_kinds == {"param"}


def test_an_overflow_in_float16_skips_the_step(outcomes: Outcomes) -> None:
    assert outcomes["float16"] == [Overflow(skipped=1.0, version=0, weights_stay=True)] * 2


def test_a_batch_that_does_not_divide_into_micro_batches_is_refused(outcomes: Outcomes) -> None:
    assert outcomes["uneven"] == [[("tokens", "not-divisible")]] * len(outcomes["uneven"])


def test_images_are_refused(outcomes: Outcomes) -> None:
    assert outcomes["images"] == [[("images", "images-unsupported")]] * 2


@pytest.mark.parametrize("base", RECOMPUTING)
@pytest.mark.parametrize("name", list(RECOMPUTED)[1:])
def test_recomputation_changes_no_bit(outcomes: Outcomes, base: str, name: str) -> None:
    """Adapters alone require gradients; the embedding and later weights then do not."""
    for ranks in outcomes[base]:
        plain = ranks["nothing"]
        recomputed = ranks[name]
        assert recomputed.report == plain.report
        assert recomputed.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(gradient, plain.gradients[owner]) for owner, gradient in recomputed.gradients.items())
        assert any(gradient.any() for gradient in recomputed.gradients.values())
        assert recomputed.kept_nbytes < plain.kept_nbytes
