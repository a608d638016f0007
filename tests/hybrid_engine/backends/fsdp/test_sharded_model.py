"""Requirements on a sharded model, the place of its parts, and use in a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.internals import StridedShard
from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, local_of
from hybrid_engine.backends.huggingface import load_hf_checkpoint, save_hf_checkpoint
from hybrid_engine.errors import HybridEngineError, ModelError, ReshardError, WeightError
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.job import Job
from tests.harness.errors import failing, refused
from tests.harness.launch import on_engines
from tests.zoo.families import read_config, served_config, tiny_config, write_config
from tests.zoo.sharded_models import from_config, shard


@dataclass(frozen=True)
class Rank:
    """Inputs of a scenario on one rank."""

    job: Job
    path: Path
    table: ModelTable

    def model(self) -> torch.nn.Module:
        return from_config(self.path)

    def wrapped(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> ShardedModel:
        return ShardedModel(model, self.table, self.job.rank, optimizers)


def train(model: torch.nn.Module, *, sync: bool = True) -> None:
    """Run a forward and a backward pass."""
    tokens = torch.arange(16).reshape(2, 8)
    model.set_requires_gradient_sync(sync)
    model(tokens).logits.float().square().mean().backward()


# -- refused models --------------------------------------------------------------------------------


def not_sharded(rank: Rank) -> None:
    rank.wrapped(rank.model())


def on_meta(rank: Rank) -> None:
    with torch.device("meta"):
        rank.wrapped(shard(rank.model()))


def with_several_faults(rank: Rank) -> None:
    """A model with faults in several parameters; one error names all."""
    model = shard(rank.model())
    norm = model.model.norm
    head = model.lm_head
    norm.weight = torch.nn.Parameter(
        DTensor.from_local(local_of(norm.weight), norm.weight.device_mesh, [Partial()])
    )
    head.weight = torch.nn.Parameter(torch.zeros(130, 64, dtype=torch.int8), requires_grad=False)
    rank.wrapped(model)


def strided_the_other_way(rank: Rank) -> None:
    """Each rank holds every second row, which is not a box."""
    model = shard(rank.model())
    weight = model.lm_head.weight
    mesh = init_device_mesh("cpu", (1, 2))
    strided = DTensor.from_local(
        local_of(weight), mesh, [Replicate(), StridedShard(0, split_factor=2)]
    )
    model.lm_head.weight = torch.nn.Parameter(strided)
    rank.wrapped(model)


def wrapped_by_others(rank: Rank) -> None:
    rank.wrapped(torch.nn.parallel.DistributedDataParallel(rank.model()))


def driven_twice(rank: Rank) -> None:
    model = shard(rank.model())
    first = rank.wrapped(model)
    first.close()  # after this the model may be wrapped again
    second = rank.wrapped(model)
    rank.wrapped(model)
    second.close()


def optimizer_of_another_model(rank: Rank) -> None:
    model = rank.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # sharding replaces the parameters
    rank.wrapped(shard(model), optimizer)


def sharded_later(rank: Rank) -> None:
    """`fully_shard` on a part of a sharded model replaces its parameters."""
    model = shard(rank.model())
    wrapped = rank.wrapped(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.full_tensor())
    fully_shard(model.lm_head)
    wrapped.weights.prepare()


def steps_of_a_mixed_optimizer(rank: Rank) -> None:
    """An optimizer made after the model was wrapped is checked at its first step."""
    model = shard(rank.model())
    wrapped = rank.wrapped(model)
    other = torch.nn.Parameter(torch.zeros(2))
    try:
        torch.optim.SGD([*model.parameters(), other], lr=0.1).step()
    finally:
        wrapped.close()


def not_finite(rank: Rank) -> None:
    model = shard(rank.model())
    wrapped = rank.wrapped(model)
    with torch.no_grad():
        local_of(model.model.norm.weight)[0] = float("nan")
    wrapped.weights.check_values()


# name -> (model, error, its code, part of its message)
REFUSED: dict[str, tuple[Callable[[Rank], None], type[HybridEngineError], str, str]] = {
    "not sharded": (not_sharded, ModelError, "unusable-model", "fully_shard"),
    "on meta": (on_meta, ModelError, "unusable-model", r"model\.embed_tokens\.weight.*to_empty"),
    "placements": (
        with_several_faults,
        ModelError,
        "unusable-model",
        r"(?=.*\n  lm_head\.weight: stored as int8)"
        r"(?=.*\n  model\.norm\.weight: unsupported placement Partial)"
        r"(?=.*\n  lm_head\.weight: not sharded)",
    ),
    "strided": (
        strided_the_other_way,
        ModelError,
        "unusable-model",
        r"lm_head\.weight.*_StridedShard",
    ),
    "by others": (wrapped_by_others, ModelError, "unusable-model", "DistributedDataParallel"),
    "driven twice": (driven_twice, ModelError, "already-driven", ""),
    "a mixed optimizer": (steps_of_a_mixed_optimizer, ModelError, "foreign-parameters", "1 of 22"),
    "another optimizer": (optimizer_of_another_model, ModelError, "foreign-parameters", "21 of 21"),
    "sharded later": (sharded_later, ReshardError, "parameters-moved", "1 parameters"),
    "not finite": (not_finite, WeightError, "", r"model\.norm\.weight on rank"),
}


@contextmanager
def joined(path: Path) -> Iterator[Rank]:
    """Write the config of a model, and join the job of its ranks."""
    with closing(Job.join(60)) as job:
        if job.rank == 0:
            write_config(path, served_config("llama", torch_dtype="float32"))
        job.agreement.conclude("writing the config")
        yield Rank(job, path, table_for(read_config(path)))


@on_engines(2)
@pytest.mark.parametrize("name", REFUSED)
def test_unusable_models_are_refused_on_every_rank(tmp_path: Path, name: str) -> None:
    make, *error = REFUSED[name]
    with joined(tmp_path) as rank, failing(*error):
        make(rank)


def test_gathered_parameters_are_freed_and_moved_ones_refused(job: None, tmp_path: Path) -> None:
    with joined(tmp_path) as rank:
        model = shard(rank.model())
        weights = rank.wrapped(model).weights
        model(torch.arange(8)[None])  # the head stays gathered
        weights.prepare()
        assert isinstance(model.lm_head.weight, DTensor)
        model.to(torch.float64)
        with refused(ReshardError, "parameters-moved", "21 parameters"):
            weights.prepare()


# -- accepted models -------------------------------------------------------------------------------


@on_engines(2)
def test_steps_of_every_optimizer_are_counted(tmp_path: Path) -> None:
    """Steps of later optimizers count as well; steps of other models do not."""
    with joined(tmp_path) as rank:
        model = shard(rank.model())
        wrapped = rank.wrapped(model)
        late, later = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
        other.step()
        assert (wrapped.version, wrapped.optimizers) == (0, [])
        train(model)
        late.step()
        late.step()
        assert (wrapped.version, wrapped.optimizers) == (2, [late])
        for _ in range(3):  # steps of either optimizer make new weights
            later.step()
        assert (wrapped.version, wrapped.optimizers) == (5, [late, later])


@on_engines(2)
def test_a_part_without_rows_is_counted(tmp_path: Path) -> None:
    """A part without rows has memory that is counted and can be offloaded."""
    with joined(tmp_path) as rank:
        model = torch.nn.Linear(8, 1, bias=False)  # one row for two ranks
        fully_shard(model)
        tensors = ShardedTensors(model)
        assert tensors.parts["weight"].lengths == (1 - rank.job.rank, 8)
        assert tensors.flat_buffers["weight"].numel() == 8


@on_engines(2)
def test_a_checkpoint_without_mtp_layers_is_complete(tmp_path: Path) -> None:
    """A checkpoint without MTP layers is complete, because transformers builds none."""
    with joined(tmp_path) as rank:
        path = rank.path / "mtp"
        if rank.job.rank == 0:
            write_config(
                path, tiny_config("deepseek_v3", num_nextn_predict_layers=1, torch_dtype="float32")
            )
        rank.job.agreement.conclude("writing the config")
        table = table_for(read_config(path))
        model = shard(from_config(path))
        weights = ShardedModel(model, table, rank.job.rank).weights
        save_hf_checkpoint(path / "saved", weights, table, rank.job, path)
        before = {name: flat.clone() for name, flat in weights.buffers().items()}
        for flat in weights.buffers().values():
            flat.zero_()
        load_hf_checkpoint(path / "saved", weights, table, rank.job)
        assert all(torch.equal(flat, before[name]) for name, flat in weights.buffers().items())
        save_hf_checkpoint(path / "saved", weights, table, rank.job, path)  # replaces its own files
