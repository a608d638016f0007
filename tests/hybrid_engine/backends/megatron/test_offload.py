"""Offload with Megatron's optimizers: nearly all bytes leave, training stays bitwise the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.memory.offload_items import KINDS, Part
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from tests.harness.launch import on_engines
from tests.harness.reachable import UNACCOUNTED, reachable, residual
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.memory.test_offloader import CopiesToHost
from tests.hybrid_engine.serving.publishing import calls_while_published
from tests.zoo.megatron_models import EP2, Run, loaded, negative_log_likelihood
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import Zoo, token_batch

BF16 = {"params_dtype": "bfloat16"}
REPLICATED = {"use_distributed_optimizer": False}
# name -> (model, actor settings, members of the chained optimizer)
CASES: dict[str, tuple[str, Values, int]] = {
    "bf16 distributed": ("qwen3", BF16, 1),
    "bf16 replicated": ("qwen3", {**BF16, **REPLICATED}, 1),
    "fp32 distributed": ("qwen3", {}, 1),
    "fp32 replicated": ("qwen3", REPLICATED, 1),
    "bf16 experts": ("qwen3_moe", {**BF16, **EP2}, 2),
}
NUM_STEPS = 3


@on_engines(2)
@pytest.mark.parametrize("name", CASES)
def test_nearly_all_state_leaves_and_training_stays_the_same(zoo: Zoo, name: str) -> None:
    model, settings, num_members = CASES[name]
    losses, expected = train(zoo.path(model), settings, lambda run, batch, number: None)
    assert len(set(losses)) == NUM_STEPS, "nothing is learned"
    assert len(expected) > 20

    def check(run: Run, batch: Batch, number: int) -> None:
        engine = run.engine.model
        offloader = Offloader(engine)
        # A walk of the model in every survey would take milliseconds of a switch.
        with mock.patch.object(torch.nn.Module, "named_modules", side_effect=AssertionError):
            offload_each_alone(engine, offloader)
        offload_in_parts(engine, offloader)
        if number == NUM_STEPS - 1:
            # One elastic buffer per optimizer.
            tensors = [item.tensor for item in engine.offload_items() if item.kind == "optimizer"]
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == num_members
            assert all(exported_buffer_of(tensor) is not None for tensor in tensors)
            calls: dict[str, Callable[[], object]] = {
                "train_step": lambda: run.engine.train_step(batch, negative_log_likelihood),
                "log_probs": lambda: run.engine.log_probs(batch),
                "reload_model_params": lambda: engine.optimizer.reload_model_params(),
            }
            with closing(Job.join(60)) as job:
                assert calls_while_published(engine, run.table.shapes, job, calls) == []

    assert train(zoo.path(model), settings, check) == (losses, expected)


def train(
    path: Path, settings: Values, after_step: Callable[[Run, Batch, int], None]
) -> tuple[list[float], dict[str, str]]:
    """Train NUM_STEPS steps; return the losses and digests of the state."""
    with loaded(path, **settings) as run:
        run.engine.optimizer.set_learning_rate(1e-2)
        losses = []
        for number in range(NUM_STEPS):
            batch = share_of(run.engine, token_batch(number, 4, 12))
            losses.append(run.engine.train_step(batch, negative_log_likelihood)["loss"])
            after_step(run, batch, number)
        return losses, digests(run.engine.model)


def offload_each_alone(engine: Any, offloader: Offloader) -> None:
    """Offload each kind alone; only its bytes leave."""
    for kind in KINDS:
        for item in engine.offload_items():
            if item.kind == "grad":
                item.tensor.fill_(1)  # zeros not written since they were onloaded have no pages
        offloader.offload({kind})
        assert [other for other, nbytes in offloader.resident_nbytes().items() if not nbytes] == [
            kind
        ]
        offloader.onload({kind}, late={kind})
        offloader.wait()


def offload_in_parts(engine: Any, offloader: Offloader) -> None:
    """Offload parameters by pages, then everything; onload, offload and onload again."""
    total = sum(offloader.resident_nbytes().values())
    flats = list(engine.weights.buffers().values())
    halves = [Part(flat, 0, flat.numel() // 2) for flat in flats]
    for _ in range(2):  # the second call finds nothing left to move
        assert offloader.offload_parts("param", halves) >= 0
    offloader.offload()
    reached = reachable(model=engine.chunks, optimizer=engine.optimizer)
    left = residual(engine.offload_items(), reached)
    assert sum(left.values()) <= 0.01 * total
    assert not [owner for owner in left if owner.startswith(UNACCOUNTED)]
    offloader.onload({"param"}, read_only=True)
    # Host copies are still valid after a read-only onload.
    copies = CopiesToHost(offloader)
    assert offloader.offload({"param"}) > 0
    assert copies.nbytes == 0
    offloader.onload()


def digests(engine: Any) -> dict[str, str]:
    """Digest of every parameter, main parameter and moment, by name."""
    from megatron_patches import optimizer_tensors

    tensors = dict(engine.weights.model.named_parameters())
    tensors |= {
        f"{t.path}.{t.key}": t.tensor
        for t in optimizer_tensors(engine.optimizer)
        if t.kind != "main_grad"
    }
    return {name: digest(tensor) for name, tensor in tensors.items()}
