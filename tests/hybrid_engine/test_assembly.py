"""An inference engine is shut down if building fails afterwards, on this rank or on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

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
from tests.harness.launch import Ranks
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


def hold_less(directory: str) -> tuple[str, bool]:
    """Build engines that lack a tensor of their position; return the error, and if they ended."""
    dist.init_process_group("gloo")
    job = Job.join(60)
    served = served_config("qwen3")
    model = Path(write_config(Path(directory), served))
    generate = GenerateConfig(infer_tensor_parallel_size=2, max_model_len=64, max_num_seqs=8)
    computed = inference_side(table_for(served), generate.sizes(job.world_size)).layout_of(job.rank)
    engine = FakeVllm(lambda: computed.without(["lm_head.weight"]))
    with pytest.raises(ParameterMismatchError) as caught:
        build(
            job, lambda *_args, **_settings: engine, served, model=model, generate_config=generate
        )
    job.close()
    dist.destroy_process_group()
    return str(caught.value), engine.is_shut_down


def test_an_engine_without_all_its_tensors_is_shut_down(engines: Ranks, tmp_path: Path) -> None:
    for rank, (error, was_ended) in enumerate(engines.launch(hold_less, 2, str(tmp_path))):
        assert f"lm_head.weight: on rank {rank} vLLM holds other parts of it" in error
        assert was_ended


def quantise_whole_tensors(directory: str) -> None:
    """Ask for quantised weights of a trainer that only stores tensors."""
    dist.init_process_group("gloo")
    model = Path(write_config(Path(directory), served_config("qwen3")))
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


def test_trainers_that_cannot_quantise_are_refused(engines: Ranks, tmp_path: Path) -> None:
    engines.launch(quantise_whole_tensors, 1, str(tmp_path))


def fail_on_rank_1(model: Path) -> tuple[str, bool]:
    """Fail to build on rank 1; return the error, and whether this rank's engine ended."""
    dist.init_process_group("gloo")
    job = Job.join(60)
    engine = FakeVllm(lambda: Layout({}, {}))

    def construct(*_args: Any, **_settings: Any) -> FakeVllm:
        if job.rank == 1:
            raise MemoryError("no memory on rank 1")
        return engine

    with pytest.raises(Exception, match="no memory on rank 1") as caught:
        build(job, construct, model=model)
    job.close()
    dist.destroy_process_group()
    return type(caught.value).__name__, engine.is_shut_down


def test_an_engine_is_shut_down_if_another_rank_fails(engines: Ranks, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", dict(DENSE))
    (error, was_ended), (_, rank_1_ended) = engines.launch(fail_on_rank_1, 2, model)
    assert error == RemoteError.__name__
    assert was_ended
    assert not rank_1_ended
