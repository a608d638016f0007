"""Offload with Megatron's optimizers: nearly all bytes leave, training stays bitwise the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.config import ActorConfig
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.memory.offload_items import KINDS, Part
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.harness.reachable import UNACCOUNTED, reachable, residual
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.serving.publishing import calls_while_published
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import save_model, token_batch

BF16 = {"params_dtype": "bfloat16"}
REPLICATED = {"use_distributed_optimizer": False}
# name -> (model, actor settings, members of the chained optimizer)
CASES: dict[str, tuple[str, Values, int]] = {
    "bf16 distributed": ("dense", BF16, 1),
    "bf16 replicated": ("dense", {**BF16, **REPLICATED}, 1),
    "fp32 distributed": ("dense", {}, 1),
    "fp32 replicated": ("dense", REPLICATED, 1),
    "bf16 experts": ("experts", {**BF16, "expert_model_parallel_size": 2}, 2),
}
NUM_STEPS = 3


def run_case(path: Path, settings: Values, *, offloads: bool) -> Values:
    """Train NUM_STEPS steps; with `offloads`, exercise the offloader after every step."""
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **settings})) as run:
        load_canonical(run, path)
        model = run.engine.model
        run.engine.optimizer.set_learning_rate(1e-2)
        offloader = MegatronOffloader(model)
        result: Values = {"losses": [], "alone": [], "left": []}
        for number in range(NUM_STEPS):
            batch = share_of(run.engine, token_batch(number, 4, 12))
            result["losses"].append(run.engine.train_step(batch, negative_log_likelihood)["loss"])
            if offloads:
                # A walk of the model in every survey would take milliseconds of a switch.
                with mock.patch.object(torch.nn.Module, "named_modules", side_effect=AssertionError):
                    result["alone"].append(offload_each_alone(model, offloader))
                result["left"].append(offload_in_parts(model, offloader))
        if offloads:
            result["buffers"] = state_storages(model)
            calls: dict[str, Callable[[], object]] = {
                "train_step": lambda: run.engine.train_step(batch, negative_log_likelihood),
                "log_probs": lambda: run.engine.log_probs(batch),
                "reload_model_params": lambda: model.optimizer.reload_model_params(),
            }
            with closing(Job.join(60)) as job:
                result["let through"] = calls_while_published(model, run.table.shapes, job, calls)
        result["digest"] = digests(model)
        return result


def offload_each_alone(engine: Any, offloader: MegatronOffloader) -> dict[str, list[str]]:
    """Map each kind, offloaded alone, to the kinds without bytes on the device."""
    absent_kinds = {}
    for kind in KINDS:
        for item in engine.offload_items():
            if item.kind == "grad":
                item.tensor.fill_(1)  # zeros not written since they were onloaded have no pages
        offloader.offload({kind})
        absent_kinds[kind] = [
            other for other, owners in offloader.resident_nbytes().items() if not sum(owners.values())
        ]
        offloader.onload({kind}, late={kind})
        offloader.wait()
    return absent_kinds


def offload_in_parts(engine: Any, offloader: MegatronOffloader) -> tuple[float, list[str]]:
    """Offload parameters by pages, then everything; onload, offload and onload again.

    Returns the share of bytes that stayed on the device and the owners of unaccounted bytes.
    """
    total = sum(sum(owners.values()) for owners in offloader.resident_nbytes().values())
    flats = list(engine.weights.buffers().values())
    halves = [Part(flat, 0, flat.numel() // 2) for flat in flats]
    for _ in range(2):  # the second call finds nothing left to move
        assert offloader.offload_parts("param", halves) >= 0
    offloader.offload()
    reached = reachable(model=engine.chunks, optimizer=engine.optimizer)
    left = residual(engine.offload_items(), reached)
    offloader.onload({"param"}, read_only=True)
    # Host copies are still valid after a read-only onload.
    assert offloader.offload({"param"}).copied_nbytes == {"param": 0}
    offloader.onload()
    return sum(left.values()) / total, [owner for owner in left if owner.startswith(UNACCOUNTED)]


def state_storages(engine: Any) -> tuple[int, bool]:
    """Return the number of storages of optimizer state, and whether all are elastic."""
    tensors = [item.tensor for item in engine.offload_items() if item.kind == "optimizer"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(storages), all(exported_buffer_of(tensor) is not None for tensor in tensors)


def digests(engine: Any) -> dict[str, str]:
    """Digest of every parameter, main parameter and moment, by name."""
    from megatron_patches import optimizer_tensors

    tensors = dict(engine.weights.model.named_parameters())
    tensors |= {f"{t.path}.{t.key}": t.tensor for t in optimizer_tensors(engine.optimizer) if t.kind != "main_grad"}
    return {name: digest(tensor) for name, tensor in tensors.items()}


def run_cases(paths: dict[str, Path]) -> dict[str, tuple[Values, Values]]:
    """Run each case on this rank, first without and then with offloading."""
    return {
        name: (run_case(paths[model], settings, offloads=False), run_case(paths[model], settings, offloads=True))
        for name, (model, settings, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Values]:
    paths = {
        "dense": save_model(tmp_path_factory.mktemp("dense"), "qwen3"),
        "experts": save_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"),
    }
    return engines.launch(run_cases, 2, paths)


@pytest.mark.parametrize("name", CASES)
def test_nearly_all_state_leaves_and_training_stays_the_same(outcomes: list[Values], name: str) -> None:
    for without, with_offloading in (rank[name] for rank in outcomes):
        assert with_offloading["losses"] == without["losses"]
        assert len(set(without["losses"])) == NUM_STEPS, "nothing is learned"
        assert with_offloading["digest"] == without["digest"]
        assert len(without["digest"]) > 20
        for share, unaccounted in with_offloading["left"]:
            assert share <= 0.01
            assert unaccounted == []
        assert with_offloading["let through"] == [], "a call used state that a publisher has offloaded"
        assert with_offloading["alone"] == [{kind: [kind] for kind in KINDS}] * NUM_STEPS
        _, _, num_members = CASES[name]
        assert with_offloading["buffers"] == (num_members, True), "one elastic buffer per optimizer"
