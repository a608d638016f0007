"""Megatron through `TrainEngine` against transformers: the same checkpoint, the same tokens, the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.ports import Batch
from tests.harness.launch import Call, Outcomes, Ranks
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, reference_of, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import build_hf_model, label_log_probs, save_model, token_batch, train_hf_model

# fp32: sums in another order only. Logits reach about 5, log-probabilities about -10.
ATOL = 1e-4
BATCH, LENGTH = 4, 12

# name -> (family, what differs from tests.zoo.families.SIZES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases, other rotary base": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, four layers": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3, one kv head": ("qwen3", {"num_key_value_heads": 1}),
}

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

# name -> (model, actor settings): settings of the engines that must all give the model's own numbers
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "llama tp2": ("llama", TP2),
        "llama, biases dp2": ("llama, biases, other rotary base", {}),
        "llama, biases pp2": ("llama, biases, other rotary base", PP2),
        "qwen2 tp2 sp": ("qwen2, tied", {**TP2, "sequence_parallel": True}),
        "qwen3 tp2, micro batches of 2": ("qwen3", {**TP2, "micro_batch_size": 2}),
        "qwen3 pp2 vpp2": ("qwen3, tied, four layers", {**PP2, **VPP2}),
        "qwen3 tp2, one kv head": ("qwen3, one kv head", TP2),
        "qwen3 dp2, overlap": ("qwen3", OVERLAP),
        "qwen3 dp2, plain optimizer": ("qwen3", {"use_distributed_optimizer": False}),
    },
    4: {
        "qwen3 tp2 pp2": ("qwen3", {**TP2, **PP2}),
        "qwen3 tp2 pp2 vpp2, overlap": ("qwen3, tied, four layers", {**TP2, **PP2, **VPP2, **OVERLAP}),
        "qwen2 tp2 pp2": ("qwen2, tied", {**TP2, **PP2}),
        "llama tp2 dp2": ("llama", {**TP2, "micro_batch_size": 2}),
        "llama pp2 dp2, overlap": ("llama, biases, other rotary base", {**PP2, **OVERLAP}),
    },
}
NUM_STEPS = 3


def make_batch() -> dict[str, torch.Tensor]:
    """A whole batch; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, BATCH, LENGTH)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


@dataclass(frozen=True)
class Seen:
    """What one rank computed, of the whole batch where it is not a share.

    Attributes:
        logits, log_probs: before training.
        reports: by step; `unreported`: of one more, whose loss reports nothing.
        final: log-probabilities afterwards.
        version: of the weights after NUM_STEPS steps.
        offload: bytes of `offload_items` by kind, without caches.
        groups: Megatron's names of its process groups.
    """

    logits: torch.Tensor
    log_probs: torch.Tensor
    reports: list[dict[str, float]]
    unreported: dict[str, float]
    final: torch.Tensor
    version: int
    offload: dict[str, int]
    groups: set[str]


def run_layout(path: Path, settings: dict[str, Any]) -> Seen:
    from hybrid_engine.backends.megatron.internals import process_groups

    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 3e-3, "weight_decay": 0.1}})
    with running(path, config) as run:
        load_canonical(run, path)
        engine, batch = run.engine, make_batch()
        mine = share_of(engine, batch)
        logits = engine.logits(mine["tokens"])
        log_probs = engine.log_probs(mine)
        reports = []
        for _ in range(NUM_STEPS):
            reports.append(engine.train_step(mine, negative_log_likelihood))
            engine.log_probs(mine)  # scoring between steps changes nothing
        version = engine.version
        unreported = engine.train_step(mine, lambda _batch, log_probs: (-log_probs.mean(), {}))
        if engine.dp_size > 1:
            refuse_other_names(engine, mine)
        return Seen(
            logits=engine.gather_over_data_parallel(logits),
            log_probs=engine.gather_over_data_parallel(log_probs),
            reports=reports,
            unreported=unreported,
            final=engine.gather_over_data_parallel(engine.log_probs(mine)),
            version=version,
            offload=offload_nbytes(engine),
            groups={group.group_desc for group in process_groups() if group is not None},
        )


def refuse_other_names(engine: Any, mine: Batch) -> None:
    """Ranks whose losses report different names train on nothing, and all hear of it."""
    before, name = engine.log_probs(mine), f"of rank {engine.dp_rank}"
    with pytest.raises(HybridEngineError, match=r"other names on other data parallel ranks|failed on another rank"):
        engine.train_step(mine, lambda _batch, log_probs: (-log_probs.mean(), {name: 1.0}))
    assert torch.equal(engine.log_probs(mine), before)


def offload_nbytes(engine: Any) -> dict[str, int]:
    """Every storage is of one kind, and every item has an owner of its own."""
    kinds: dict[int, str] = {}
    nbytes: dict[str, int] = {"param": 0, "grad": 0, "optimizer": 0}
    for item in engine.offload_items():
        if item.action == "rebuild":
            continue
        storage = item.tensor.untyped_storage().data_ptr()
        assert kinds.setdefault(storage, item.kind) == item.kind, item.owner
        nbytes[item.kind] += item.tensor.nbytes
    owners = [item.owner for item in engine.offload_items()]
    assert len(set(owners)) == len(owners)
    return nbytes


@dataclass(frozen=True)
class HalfPrecision:
    """What one rank computed in bfloat16, with a reference made before a step.

    Attributes:
        log_probs, trained: of the actor, before and after the step; reference, later: of the reference.
        versions: of the reference and of the actor.
        reference_kinds: what of it can be offloaded.
    """

    log_probs: torch.Tensor
    reference: torch.Tensor
    trained: torch.Tensor
    later: torch.Tensor
    versions: tuple[int, int]
    reference_kinds: set[str]


def run_bfloat16(path: Path) -> HalfPrecision:
    batch = make_batch()
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "bfloat16"})) as run:
        load_canonical(run, path)
        log_probs = run.engine.log_probs(batch)
        reference = reference_of(run, path)
        reference.copy_weights_from(run.engine)
        frozen = reference.log_probs(batch)
        run.engine.set_learning_rate(1e-2)
        run.engine.train_step(batch, negative_log_likelihood)
        return HalfPrecision(
            log_probs=log_probs,
            reference=frozen,
            trained=run.engine.log_probs(batch),
            later=reference.log_probs(batch),
            versions=(reference.version, run.engine.version),
            reference_kinds={item.kind for item in reference.offload_items()},
        )


@dataclass(frozen=True)
class Overflow:
    """A step in float16, whose first loss scale is 2**32."""

    skipped: float
    version: int
    weights_stay: bool


def run_float16(path: Path) -> Overflow:
    batch = make_batch()
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "float16"})) as run:
        load_canonical(run, path)
        before = run.engine.log_probs(batch)
        report = run.engine.train_step(batch, negative_log_likelihood)
        return Overflow(report["skipped"], run.engine.version, torch.equal(before, run.engine.log_probs(batch)))


def refuse_uneven_batch(path: Path) -> str:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "micro_batch_size": 3})) as run:
        with pytest.raises(ValueError, match="micro_batch_size") as caught:
            run.engine.log_probs(make_batch())
        dist.barrier()
        return str(caught.value)


FULL = {"recompute_granularity": "full"}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "all layers": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    "a layer": {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}


@dataclass(frozen=True)
class Recomputed:
    """A step on one micro batch.

    Attributes:
        report: its figures.
        gradients: by parameter.
        kept_nbytes: bytes that autograd kept of the forward pass.
    """

    report: dict[str, float]
    gradients: dict[str, torch.Tensor]
    kept_nbytes: int


def run_recomputed(path: Path, base: dict[str, Any]) -> dict[str, Recomputed]:
    return {name: _recomputed(path, {**base, **settings}) for name, settings in RECOMPUTED.items()}


def _recomputed(path: Path, settings: dict[str, Any]) -> Recomputed:
    kept: list[int] = []
    ends: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def loss(batch: Any, log_probs: torch.Tensor) -> Any:
        ends.append(len(kept))  # of the forward pass
        return negative_log_likelihood(batch, log_probs)

    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "micro_batch_size": BATCH, **settings})) as run:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            report = run.engine.train_step(make_batch(), loss)
        gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in run.engine.weights.model.named_parameters()
            if parameter.requires_grad
        }
    return Recomputed(report, gradients, sum(kept[: ends[0]]))


RECOMPUTING = {"recomputed": {}, "recomputed, adapters": {"lora": {"rank": 4}}}
FURTHER = {"bfloat16": run_bfloat16, "float16": run_float16, "uneven": refuse_uneven_batch}
"""On two ranks."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def launched(engines: Ranks, paths: dict[str, Path]) -> Callable[[int], Outcomes]:
    """Number of ranks -> what all that runs on so many brought back; each number is launched once."""

    def launch_on(num_ranks: int) -> Outcomes:
        calls: dict[str, Call] = {
            name: (run_layout, (paths[model], settings)) for name, (model, settings) in LAYOUTS[num_ranks].items()
        }
        if num_ranks == 2:
            calls |= {name: (function, (paths["qwen3"],)) for name, function in FURTHER.items()}
            calls |= {name: (run_recomputed, (paths["qwen3"], base)) for name, base in RECOMPUTING.items()}
        return engines.launch_in_turn(num_ranks, calls)

    return functools.cache(launch_on)


@dataclass(frozen=True)
class Compared:
    """What the ranks of a layout computed, and the name of its model."""

    ranks: list[Seen]
    model: str


@pytest.fixture(
    params=[pytest.param((num_ranks, name), id=name) for num_ranks, layouts in LAYOUTS.items() for name in layouts]
)
def compared(request: pytest.FixtureRequest, launched: Callable[[int], Outcomes]) -> Compared:
    num_ranks, name = request.param
    return Compared(launched(num_ranks)[name], LAYOUTS[num_ranks][name][0])


@functools.cache
def logits_of_transformers(model: str) -> torch.Tensor:
    family, changes = MODELS[model]
    with torch.no_grad():
        return build_hf_model(family, **changes)(make_batch()["tokens"]).logits


@functools.cache
def trained_by_transformers(model: str) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses, gradient norms and final log-probabilities of the same steps with transformers and torch's Adam."""
    family, changes = MODELS[model]
    return train_hf_model(build_hf_model(family, **changes), make_batch(), NUM_STEPS + 1, weight_decay=0.1)


def test_logits_are_those_of_transformers(compared: Compared) -> None:
    expected = logits_of_transformers(compared.model)
    assert expected.abs().max() > 1, "logits this small show little"
    for found in compared.ranks:
        torch.testing.assert_close(found.logits, expected, atol=ATOL, rtol=0)


def test_log_probs_are_those_of_transformers(compared: Compared) -> None:
    expected = label_log_probs(logits_of_transformers(compared.model), make_batch()["labels"])
    for found in compared.ranks:
        torch.testing.assert_close(found.log_probs, expected, atol=ATOL, rtol=0)


def test_training_follows_transformers_with_adam(compared: Compared) -> None:
    losses, norms, final = trained_by_transformers(compared.model)
    assert losses[-1] < losses[0] - 0.05, "the reference does not learn: this test shows nothing"
    for found in compared.ranks:
        assert [report["loss"] for report in found.reports] == pytest.approx(losses[:-1], abs=ATOL)
        assert [report["grad_norm"] for report in found.reports] == pytest.approx(norms[:-1], rel=1e-3)
        # Adam turns rounding of tiny gradients into whole steps; so wider
        torch.testing.assert_close(found.final, final, atol=1e-4, rtol=0)


def test_reports_are_equal_on_all_ranks(compared: Compared) -> None:
    assert all(found.reports == compared.ranks[0].reports for found in compared.ranks)
    assert all(report["skipped"] == 0.0 for report in compared.ranks[0].reports)


def test_a_loss_that_reports_nothing_has_the_steps_own_figures(compared: Compared) -> None:
    assert all(found.unreported.keys() == {"grad_norm", "learning_rate", "skipped"} for found in compared.ranks)


def test_every_step_is_a_version(compared: Compared) -> None:
    assert {found.version for found in compared.ranks} == {NUM_STEPS}


def test_offload_items_are_all_that_is_held(compared: Compared) -> None:
    for found in compared.ranks:
        assert found.offload["param"] > 0
        assert found.offload["grad"] >= found.offload["param"]
        assert found.offload["optimizer"] > 0  # Adam's two moments in fp32, over dp_size


def test_megatron_makes_no_gloo_groups_beside_its_own(compared: Compared) -> None:
    for found in compared.ranks:
        assert "DATA_PARALLEL_GROUP" in found.groups
        assert [name for name in found.groups if "GLOO" in name] == []


def test_bfloat16_computes_nearly_the_same(launched: Callable[[int], Outcomes]) -> None:
    expected = label_log_probs(logits_of_transformers("qwen3"), make_batch()["labels"])
    for found in launched(2)["bfloat16"]:
        assert (found.log_probs - expected).abs().max() < 0.3  # bf16 has 8 bits
        assert (found.log_probs - expected).abs().mean() < 0.05


def test_a_reference_stays_when_the_actor_moves(launched: Callable[[int], Outcomes]) -> None:
    for found in launched(2)["bfloat16"]:
        assert torch.equal(found.reference, found.log_probs)
        assert torch.equal(found.later, found.reference)
        assert not torch.equal(found.trained, found.log_probs)
        assert found.versions == (0, 1)


def test_a_reference_holds_weights_only(launched: Callable[[int], Outcomes]) -> None:
    assert [found.reference_kinds for found in launched(2)["bfloat16"]] == [{"param"}] * 2


def test_an_overflow_in_float16_skips_the_step(launched: Callable[[int], Outcomes]) -> None:
    assert launched(2)["float16"] == [Overflow(skipped=1.0, version=0, weights_stay=True)] * 2


def test_a_batch_that_is_no_multiple_of_micro_batches_is_refused(launched: Callable[[int], Outcomes]) -> None:
    assert all("rows must be a multiple of micro_batch_size 3, got 4" in text for text in launched(2)["uneven"])


@pytest.mark.parametrize("base", RECOMPUTING)
@pytest.mark.parametrize("name", list(RECOMPUTED)[1:])
def test_what_is_computed_again_changes_no_bit(launched: Callable[[int], Outcomes], base: str, name: str) -> None:
    """With adapters neither the embedding nor what follows it asks for a gradient by itself."""
    for ranks in launched(2)[base]:
        plain, found = ranks["nothing"], ranks[name]
        assert found.report == plain.report
        assert found.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(gradient, plain.gradients[owner]) for owner, gradient in found.gradients.items())
        assert any(gradient.any() for gradient in found.gradients.values())
        assert found.kept_nbytes < plain.kept_nbytes
