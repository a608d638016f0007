"""Megatron through `TrainEngine` against transformers: the same checkpoint, the same tokens, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.worker import share_of
from tests.harness.core_versions import without
from tests.harness.launch import Ranks
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, reference_of, running
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

# (model, actor settings): settings of the engines that must all give the model's own numbers
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
LATER = {2: ("qwen3 tp2, one kv head",)}
NUM_STEPS = 3


def make_batch() -> dict[str, torch.Tensor]:
    """A whole batch; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, BATCH, LENGTH)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


def run_layouts(layouts: dict[str, tuple[str, dict[str, Any]]], paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """On every rank: what each engine computes."""
    return {name: run_layout(paths[model], settings) for name, (model, settings) in layouts.items()}


def run_layout(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
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
        assert engine.version == NUM_STEPS
        unreported = engine.train_step(mine, lambda _batch, log_probs: (-log_probs.mean(), {}))
        return {
            "logits": engine.gather_over_data_parallel(logits),
            "log_probs": engine.gather_over_data_parallel(log_probs),
            "reports": reports,
            "final": engine.gather_over_data_parallel(engine.log_probs(mine)),
            "unreported": unreported,
            "offload": describe_offload(engine),
        }


def describe_offload(engine: Any) -> dict[str, int]:
    """Bytes of `offload_items` by kind, without caches; every storage appears under one kind."""
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


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes) in MODELS.items()
    }


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def results(engines: Ranks, request: pytest.FixtureRequest, paths: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Layout -> what each rank computed."""
    layouts = without(LAYOUTS[request.param], *LATER.get(request.param, ()))
    by_rank = engines.launch(run_layouts, request.param, layouts, paths)
    return {name: [result[name] for result in by_rank] for name in layouts}


def model_of(layout: str) -> str:
    return next(layouts[layout][0] for layouts in LAYOUTS.values() if layout in layouts)


def trained_by_transformers(model_name: str) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses, gradient norms and final log-probabilities of the same steps with transformers and torch's Adam."""
    family, changes = MODELS[model_name]
    model, batch = build_hf_model(family, **changes), make_batch()
    return train_hf_model(model, batch, NUM_STEPS + 1, weight_decay=0.1)


def test_logits_and_log_probs_are_those_of_transformers(results: dict[str, list[dict[str, Any]]]) -> None:
    batch = make_batch()
    for layout, ranks in results.items():
        family, changes = MODELS[model_of(layout)]
        with torch.no_grad():
            expected = build_hf_model(family, **changes)(batch["tokens"]).logits
        assert expected.abs().max() > 1, "logits this small show little"
        for rank, result in enumerate(ranks):
            torch.testing.assert_close(
                result["logits"], expected, atol=ATOL, rtol=0, msg=lambda m, at=f"{layout}, rank {rank}": f"{at}: {m}"
            )
            torch.testing.assert_close(
                result["log_probs"],
                label_log_probs(expected, batch["labels"]),
                atol=ATOL,
                rtol=0,
                msg=lambda m, at=f"{layout}, rank {rank}": f"{at}: {m}",
            )


def test_training_follows_transformers_with_adam(results: dict[str, list[dict[str, Any]]]) -> None:
    for layout, ranks in results.items():
        losses, norms, final = trained_by_transformers(model_of(layout))
        assert losses[-1] < losses[0] - 0.05, "the reference does not learn: this test shows nothing"
        for result in ranks:
            reports = result["reports"]
            assert [report["loss"] for report in reports] == pytest.approx(losses[:-1], abs=ATOL), layout
            assert [report["grad_norm"] for report in reports] == pytest.approx(norms[:-1], rel=1e-3), layout
            # Adam turns rounding of tiny gradients into whole steps; so wider
            torch.testing.assert_close(result["final"], final, atol=1e-4, rtol=0, msg=lambda m, at=layout: f"{at}: {m}")


def test_reports_are_equal_on_all_ranks(results: dict[str, list[dict[str, Any]]]) -> None:
    for layout, ranks in results.items():
        assert all(result["reports"] == ranks[0]["reports"] for result in ranks), layout
        assert all(report["skipped"] == 0.0 for report in ranks[0]["reports"]), layout
        assert ranks[0]["unreported"].keys() == {"grad_norm", "skipped"}, layout


def test_offload_items_are_all_that_is_held(results: dict[str, list[dict[str, Any]]]) -> None:
    for layout, ranks in results.items():
        for result in ranks:
            nbytes = result["offload"]
            assert nbytes["param"] > 0, layout
            assert nbytes["grad"] >= nbytes["param"], layout
            assert nbytes["optimizer"] > 0, layout  # Adam's two moments in fp32, over dp_size


def edge_cases(path: Path) -> dict[str, Any]:
    """On both ranks: a reference, bfloat16, float16 with an overflow, and batches that do not fit."""
    found: dict[str, Any] = {}
    batch = make_batch()
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "bfloat16"})) as run:
        load_canonical(run, path)
        found["bfloat16"] = run.engine.log_probs(batch)
        reference = reference_of(run, path)
        reference.copy_weights_from(run.engine)
        frozen = reference.log_probs(batch)
        run.engine.set_learning_rate(1e-2)
        run.engine.train_step(batch, negative_log_likelihood)
        found["reference"] = (reference.version, run.engine.version)
        found["frozen stays"] = torch.equal(frozen, found["bfloat16"]) and torch.equal(
            reference.log_probs(batch), frozen
        )
        found["kinds of the reference"] = sorted({item.kind for item in reference.offload_items()})
        trained = run.engine.log_probs(batch)
        found["actor moves"] = not torch.equal(trained, found["bfloat16"])
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "float16"})) as run:
        load_canonical(run, path)
        before = run.engine.log_probs(batch)
        report = run.engine.train_step(batch, negative_log_likelihood)  # Megatron's first loss scale is 2**32
        found["float16"] = (report["skipped"], run.engine.version, torch.equal(before, run.engine.log_probs(batch)))
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2, "micro_batch_size": 3})) as run:
        with pytest.raises(ValueError, match="must be a multiple of micro_batch_size 3, got 4") as caught:
            run.engine.log_probs(batch)
        found["uneven"] = str(caught.value)
        dist.barrier()
    return found


def test_edge_cases(engines: Ranks, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen3")
    first, second = engines.launch(edge_cases, 2, path)
    batch = make_batch()
    with torch.no_grad():
        expected = label_log_probs(build_hf_model("qwen3")(batch["tokens"]).logits, batch["labels"])
    for found in (first, second):
        assert (found["bfloat16"] - expected).abs().max() < 0.3  # bf16 has 8 bits
        assert (found["bfloat16"] - expected).abs().mean() < 0.05
        assert found["reference"] == (0, 1)
        assert found["frozen stays"]
        assert found["actor moves"]
        assert found["kinds of the reference"] == ["param"]
        assert found["float16"] == (1.0, 0, True)
