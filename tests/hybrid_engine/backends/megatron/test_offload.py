"""Offload with real Megatron optimizers: nearly all bytes leave, and training is bitwise what it is without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.config import ActorConfig
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.memory.offload_items import KINDS, Part
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.harness.reachable import UNACCOUNTED, reachable, residual
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.serving.publishing import let_through
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import save_model, token_batch

BF16, REPLICATED = {"params_dtype": "bfloat16"}, {"use_distributed_optimizer": False}
# name -> (model, actor settings, members of the chained optimizer)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bf16 distributed": ("dense", BF16, 1),
    "bf16 replicated": ("dense", {**BF16, **REPLICATED}, 1),
    "fp32 distributed": ("dense", {}, 1),
    "fp32 replicated": ("dense", REPLICATED, 1),
    "bf16 experts": ("experts", {**BF16, "expert_model_parallel_size": 2}, 2),
}
NUM_STEPS = 3


def run_case(path: Path, settings: dict[str, Any], *, offloads: bool) -> dict[str, Any]:
    """NUM_STEPS steps, with everything that an offloader can do after each of them, or without."""
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **settings})) as run:
        load_canonical(run, path)
        run.engine.set_learning_rate(1e-2)
        offloader = MegatronOffloader(run.engine)
        found: dict[str, Any] = {"losses": [], "alone": [], "left": []}
        for number in range(NUM_STEPS):
            batch = share_of(run.engine, token_batch(number, 4, 12))
            found["losses"].append(run.engine.train_step(batch, negative_log_likelihood)["loss"])
            if offloads:
                found["alone"].append(offload_each_alone(run.engine, offloader))
                found["left"].append(offload_in_parts(run.engine, offloader))
        if offloads:
            found["buffers"] = state_storages(run.engine)
            calls: dict[str, Callable[[], object]] = {
                "train_step": lambda: run.engine.train_step(batch, negative_log_likelihood),
                "log_probs": lambda: run.engine.log_probs(batch),
            }
            with closing(Job.join(60)) as job:
                found["let through"] = let_through(run.engine, run.table.shapes, job, calls)
        found["digest"] = digests(run.engine)
        return found


def offload_each_alone(engine: Any, offloader: MegatronOffloader) -> dict[str, list[str]]:
    """Kind offloaded alone -> kinds that have no bytes on the device then."""
    gone = {}
    for kind in KINDS:
        for item in engine.offload_items():
            if item.kind == "grad":
                item.tensor.fill_(1)  # zeros that nobody touched since they came back have no pages
        offloader.offload({kind})
        gone[kind] = [other for other, owners in offloader.resident_nbytes().items() if not sum(owners.values())]
        offloader.onload({kind}, wait=False)
        offloader.wait()
    return gone


def offload_in_parts(engine: Any, offloader: MegatronOffloader) -> tuple[float, list[str]]:
    """Parameters page by page, then all; back, off and back again. Returns the share of bytes that stayed, and owners
    of those that nobody accounts for."""
    total = sum(sum(owners.values()) for owners in offloader.resident_nbytes().values())
    flats = list(engine.weights.buffers().values())
    assert all(offloader.offload_parts("param", [Part(f, 0, f.numel() // 2) for f in flats]) >= 0 for _ in range(2))
    offloader.offload()
    reached = reachable(model=engine.chunks, optimizer=engine.optimizer)
    left = residual(engine.offload_items(), reached)
    offloader.onload({"param"}, read_only=True)
    assert offloader.offload({"param"}).copied_nbytes == {"param": 0}
    offloader.onload()
    return sum(left.values()) / total, [owner for owner in left if owner.startswith(UNACCOUNTED)]


def state_storages(engine: Any) -> tuple[int, bool]:
    """Number of storages that the optimizer's items lie in, and whether all of them are elastic."""
    tensors = [item.tensor for item in engine.offload_items() if item.kind == "optimizer"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(storages), all(exported_buffer_of(tensor) is not None for tensor in tensors)


def digests(engine: Any) -> dict[str, str]:
    """Of every parameter, main param and moment, by name."""
    from megatron_patches import optimizer_tensors

    tensors = dict(engine.weights.model.named_parameters())
    tensors |= {f"{t.path}.{t.key}": t.tensor for t in optimizer_tensors(engine.optimizer) if t.kind != "main_grad"}
    return {name: digest(tensor) for name, tensor in tensors.items()}


def run_cases(paths: dict[str, Path]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """On every rank, for each case: (without, with offloading)."""
    return {
        name: (run_case(paths[model], settings, offloads=False), run_case(paths[model], settings, offloads=True))
        for name, (model, settings, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def outcomes(
    engines: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[dict[str, Any], dict[str, Any]]]]:
    paths = {
        "dense": save_model(tmp_path_factory.mktemp("dense"), "qwen3"),
        "experts": save_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"),
    }
    return engines.launch(run_cases, 2, paths)


def test_steps_with_offloading_are_bitwise_those_without(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        for name in CASES:
            without, with_offloading = rank[name]
            assert with_offloading["losses"] == without["losses"], name
            assert len(set(without["losses"])) == NUM_STEPS, f"{name}: nothing is learned"
            assert with_offloading["digest"] == without["digest"], name
            assert len(without["digest"]) > 20, name


def test_99_percent_of_the_bytes_leave_and_the_rest_is_accounted_for(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        for name in CASES:
            for share, unaccounted in rank[name][1]["left"]:
                assert share <= 0.01, name
                assert unaccounted == [], name


def test_nothing_uses_what_a_publisher_has_taken_off_the_device(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        for name in CASES:
            assert rank[name][1]["let through"] == [], name


def test_each_kind_leaves_by_itself(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        for name in CASES:
            assert rank[name][1]["alone"] == [{kind: [kind] for kind in KINDS}] * NUM_STEPS, name


def test_state_of_every_optimizer_lies_in_one_elastic_buffer(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        for name, (_, _, num_members) in CASES.items():
            assert rank[name][1]["buffers"] == (num_members, True), name
