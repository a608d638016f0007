"""An inference engine is shut down if building fails afterwards, on this rank or on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine import HybridEngine
from hybrid_engine.assembly import build_inference_engine, quantised_table
from hybrid_engine.backends.training_side import WholeTensors
from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig
from hybrid_engine.errors import ConfigError, ParameterMismatchError, RemoteError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.sides import Side
from tests.harness.errors import has_violation
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm.support import write_config
from tests.hybrid_engine.layouts.cases import DENSE
from tests.zoo.families import served_config


def test_print_as_a_hook_prints_on_rank_0() -> None:
    for rank, hooks in ((0, [print, len]), (1, [len])):
        engine = object.__new__(HybridEngine)
        engine.job = mock.Mock(rank=rank)
        engine._sharding = mock.Mock()
        assert [engine.on_reshard_end(hook) for hook in (print, len)]
        assert engine._sharding.on_reshard_end.mock_calls == [mock.call(hook) for hook in hooks]


class FakeVllm:
    def __init__(self, layout: Callable[[], Layout]) -> None:
        self.layout = layout
        self.is_shut_down = False

    @property
    def adaptor(self) -> FakeVllm:
        return self

    def shutdown(self) -> None:
        self.is_shut_down = True


def build(
    job: Job, construct: Callable[..., Any], of_model: Mapping[str, Any] = DENSE, **settings: Any
) -> Any:
    """Build in a job with uncut models on all ranks, with `construct` instead of vLLM."""
    config = HybridConfig(**{"model": Path("model"), "actor_config": ActorConfig(), **settings})
    table = table_for(of_model)
    side = training_side(table, config.actor_config.sizes(job.world_size))
    held = Side.of([side.layout_of(rank) for rank in range(job.world_size)])
    with mock.patch("hybrid_engine.backends.vllm.InferenceEngine", construct):
        return build_inference_engine(config, table, held, job)


@on_engines(2)
def test_an_engine_without_all_its_tensors_is_shut_down(tmp_path: Path) -> None:
    """Each rank lacks a tensor of its position."""
    with closing(Job.join(60)) as job:
        served = served_config("qwen3")
        model = Path(write_config(tmp_path, served))
        generate = GenerateConfig(infer_tensor_parallel_size=2, max_model_len=64, max_num_seqs=8)
        sizes = generate.sizes(job.world_size)
        computed = inference_side(table_for(served), sizes).layout_of(job.rank)
        engine = FakeVllm(lambda: computed.without(["lm_head.weight"]))
        differs = rf"lm_head\.weight: on rank {job.rank} vLLM holds other parts of it"
        with pytest.raises(ParameterMismatchError, match=differs):
            build(job, lambda *_, **__: engine, served, model=model, generate_config=generate)
        assert engine.is_shut_down


@on_engines(1)
def test_trainers_that_cannot_quantise_are_refused(tmp_path: Path) -> None:
    """A trainer that only stores tensors is asked for quantised weights."""
    model = Path(write_config(tmp_path, served_config("qwen3")))
    weights = WholeTensors({"a.weight": torch.zeros(2, 2)}, 0)
    refused = has_violation(
        "generate_config.quantization", "cannot-quantise", "WholeTensors", "none"
    )
    with closing(Job.join(60)) as job:
        for quantization in ("none", "fp8"):
            generate = GenerateConfig(quantization=quantization)
            config = HybridConfig(model=model, actor_config=ActorConfig(), generate_config=generate)
            table = config.table()
            with (
                pytest.raises(ConfigError, check=refused)
                if quantization == "fp8"
                else nullcontext()
            ):
                assert quantised_table(config, weights, table, job) is table


@on_engines(2)
def test_an_engine_is_shut_down_if_another_rank_fails(tmp_path: Path) -> None:
    with closing(Job.join(60)) as job:
        engine = FakeVllm(lambda: Layout({}, {}))
        construct = mock.Mock(
            return_value=engine,
            side_effect=MemoryError("no memory on rank 1") if job.rank == 1 else None,
        )
        model = write_config(tmp_path, dict(DENSE))
        kind = RemoteError if job.rank == 0 else Exception
        with pytest.raises(kind, match="no memory on rank 1"):
            build(job, construct, model=model)
        assert engine.is_shut_down is (job.rank == 0)
