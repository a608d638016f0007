"""A Megatron model filled from another one in another layout, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.ranks.groups import host_id
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.weight_container import ContainerState, WeightContainer
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.router import TransportSet, export_handles
from tests.harness.launch import Ranks
from tests.hybrid_engine.planning.cases import plan
from tests.zoo.megatron_models import DENSE_FLOAT32, Run, load_canonical, running
from tests.zoo.tiny_models import save_model

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (TP2, PP2),
    "dense, back": (PP2, TP2),
    "experts": (EP2, {**TP2, "sequence_parallel": True}),
}


def fill_all(paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: fill(paths[name], *CASES[name]) for name in CASES}


def fill(path: Path, source_sizes: dict[str, Any], target_sizes: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.resharding.megatron_core import MegatronDestination

    with running(path, ActorConfig(**DENSE_FLOAT32, **source_sizes)) as source:
        load_canonical(source, path)
    with running(path, ActorConfig(**DENSE_FLOAT32, **target_sizes)) as target:
        load_canonical(target, path)
        expected = contents(target)
        for flat in target.engine.weights.buffers().values():
            flat.fill_(7.0)
        destination = MegatronDestination(target.engine.weights)
        container, router = connect(source, destination)
        dist.barrier()
        report = container.fill(source.engine.weights.buffers())
        dist.barrier()
        router.close()
    filled = contents(target)
    rest = {buffer.name: flat for buffer, flat in padding_of(target)}
    container.release()
    return {
        "different": [name for name in expected if not torch.equal(expected[name], filled[name])],
        "num_parameters": len(expected),
        "padding": sum(float(part.abs().sum()) for part in rest.values()),
        "num_padding": sum(part.numel() for part in rest.values()),
        "received": report.received_nbytes,
        "state": container.state is ContainerState.EMPTY,
        "kept": all(torch.equal(filled[name], now) for name, now in contents(target).items()),
    }


def contents(run: Run) -> dict[str, torch.Tensor]:
    """Weights by name, without the padding of the vocabulary, which is compared apart."""
    rows = run.table.dims.vocab_size
    return {
        name: tensor.detach().clone() if "embedding" not in name and "output" not in name else words(run, tensor, rows)
        for name, tensor in run.engine.weights.model.named_weights()
    }


def words(run: Run, tensor: torch.Tensor, num_words: int) -> torch.Tensor:
    part = run.engine.weights.layout()
    held = max(
        (shard.region.lengths[0] for shard in part.shards if "embed_tokens" in shard.region.tensor),
        default=num_words,
    )
    return tensor.detach()[:held].clone()


def padding_of(run: Run) -> list[tuple[Any, torch.Tensor]]:
    layout, buffers = run.engine.weights.layout(), run.engine.weights.buffers()
    return [
        (buffer_id, torch.cat([buffers[buffer_id.name][gap.start : gap.stop] for gap in buffer.padding]))
        for buffer_id, buffer in layout.buffers.items()
        if buffer.padding
    ]


def connect(source: Run, destination: Any) -> tuple[WeightContainer, TransportSet]:
    training, rank = source.engine.weights, dist.get_rank()
    own = (training.layout(), destination.layout(), host_id(), export_handles(rank, training.buffers()))
    setups: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(setups, own)
    held, wanted = (Layout.merge(setup[side] for setup in setups) for side in (0, 1))
    made = plan(held, wanted, [setup[2] for setup in setups], bucket_nbytes=4096)
    handles = {buffer: handle for setup in setups for buffer, handle in setup[3].items()}
    router = TransportSet.connect(TransportContext(rank, held.buffers, handles, dist.group.WORLD))
    return WeightContainer(destination, made, router), router


def refusals(path: Path) -> list[str]:
    """On one rank: what is refused, and with which words."""
    from benchmarks.resharding.megatron_core import MegatronDestination

    messages = []
    with running(path, ActorConfig(**DENSE_FLOAT32)) as run:
        destination = MegatronDestination(run.engine.weights)
        for call in (destination.allocate, destination.commit):
            try:
                call(["nowhere"])
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
    with running(path, ActorConfig(**DENSE_FLOAT32, lora={"rank": 2})) as run:
        try:
            MegatronDestination(run.engine.weights)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dense = save_model(tmp_path_factory.mktemp("dense"), "qwen2", tie_word_embeddings=True)
    experts = save_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    return {name: experts if name == "experts" else dense for name in CASES}


@pytest.mark.long
def test_a_second_model_in_another_layout_gets_the_weights(engines: Ranks, paths: dict[str, Path]) -> None:
    for rank, by_case in enumerate(engines.launch(fill_all, 2, paths)):
        for name, seen in by_case.items():
            assert seen["different"] == [], (rank, name)
            assert seen["num_parameters"] >= 8, (rank, name)
            assert seen["num_padding"] > 0, (rank, name)
            assert seen["padding"] == 0.0, (rank, name)
            assert seen["received"] > 0, (rank, name)
            assert seen["state"], (rank, name)
            assert seen["kept"], (rank, name)


def test_unknown_buffers_and_adapters_are_refused(engines: Ranks, paths: dict[str, Path]) -> None:
    (messages,) = engines.launch(refusals, 1, paths["dense"])
    assert len(messages) == 3
    assert all(message.startswith("StateError: unknown buffers on rank 0: nowhere") for message in messages[:2])
    assert messages[2] == "StateError: cannot write a model with LoRA: build it without lora"
