"""The example of a user's own Megatron model, optimizer and loop, with and without an engine."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state

import hybrid_engine
from examples import bring_your_own_megatron as example
from hybrid_engine.errors import ComputationError, ConfigError, StateError
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.switch.states import State
from tests.harness.errors import has_violations, violations_of
from tests.harness.imports import left_out
from tests.harness.launch import on_engines
from tests.zoo.abilities import stored_and_loaded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_ROUNDS = 2
NUM_STEPS = 4
VERIFIED = {
    **example.CONFIG["generate_config"],
    "verify": "full",
    "bucket_mb": 1,
    "kv_cache_mb": 16,
}
WRONG = {
    "tensor_model_parallel_size": 1,
    "params_dtype": "bfloat16",
    "use_distributed_optimizer": True,  # equal to the model's
    "overlap_grad_reduce": True,
}


@on_engines(2)
def test_an_attached_engine_leaves_training_bitwise_equal() -> None:
    """Also without `prepare`, which is warned of; with a distributed optimizer or without one."""
    with left_out("hybrid_engine.trainer"):  # the loop is the user's
        hybrid_engine.prepare().__exit__(
            None, None, None
        )  # applies the patches for the runs without an engine
        with built() as (model, optimizer):
            plain = [example.train(model, optimizer, NUM_STEPS) for _ in range(NUM_ROUNDS)]
            plain.append(example.train(model, optimizer, 1))
            check_refusals(model, optimizer)
        assert len(set(plain)) == len(plain)
        assert loose_parameters(moved=True) == loose_parameters(moved=False)
        with (
            warnings_of_prepare() as warned,
            hybrid_engine.prepare(),
            built() as (model, optimizer),
        ):
            assert rounds(model, optimizer) == plain
        assert warned == []
        with warnings_of_prepare() as warned, built() as (model, optimizer):
            assert rounds(model, optimizer) == plain
        (text,) = warned
        start = (
            rf"rank {os.environ['RANK']}: [1-9][\d.]* MiB of parameters and gradients "
            r"are in ordinary memory, since"
        )
        assert re.match(start, text)


def rounds(model: torch.nn.Module, optimizer: Any) -> list[float]:
    """Return the losses of rounds with switches that compare all weights, and of a step after the
    engine was shut down.

    A setting that vLLM lacks fails the first switch before.
    """
    engine = hybrid_engine.attach(model, optimizer, {**example.CONFIG, "generate_config": VERIFIED})
    config = model.module.config
    with (
        mock.patch.object(config, "glu_linear_offset", 100.0),
        pytest.raises(ComputationError) as caught,
    ):
        engine.sharding.enter(State.INFER)
    text = str(caught.value)
    assert (
        "vLLM does not compute what the trainer computes: log-probabilities of 28 tokens are"
        in text
    )
    assert "the trainer has TransformerConfig.glu_linear_offset 100.0" in text
    assert engine.sharding.state is State.TRAIN
    losses = []
    for _ in range(NUM_ROUNDS):
        with engine.train_context():
            losses.append(example.train(model, optimizer, NUM_STEPS))
        with engine.rollout_context():
            completions = engine.generate(
                example.PROMPTS, hybrid_engine.Sampling(temperature=0.0, max_tokens=2)
            )
            assert [len(samples) for samples in completions] == [1, 1]
            with pytest.raises(StateError):
                model(torch.zeros(1, 2, dtype=torch.int64), None, None)
    assert stored_and_loaded(engine, model)
    engine.shutdown()
    return [*losses, example.train(model, optimizer, 1)]


def loose_parameters(moved: bool) -> list[float]:
    from hybrid_engine.backends.megatron.live_model import live_model
    from hybrid_engine.models.families import read_model

    names = ("DistributedDataParallelConfig", "OptimizerConfig")
    replicated = {name: _replicated(getattr(example, name)) for name in names}
    with mock.patch.multiple(example, **replicated), built() as (model, optimizer):
        losses = [example.train(model, optimizer, 1)]
        if moved:
            live_model([model], optimizer, read_model(Path(example.CONFIG["model"]))[0])
        return [*losses, example.train(model, optimizer, 2)]


def _replicated(config: type[Any]) -> Callable[..., Any]:
    """Return a constructor of the same fields without the distributed optimizer."""
    return lambda **values: config(**{**values, "use_distributed_optimizer": False})


def check_refusals(model: Any, optimizer: Any) -> None:
    """Attach what is refused before anything is built."""
    adam = torch.optim.AdamW(model.parameters())
    without_ddp = (("model_chunks[0]", "not-in-ddp"), ("optimizer", "unsupported-optimizer"))
    with pytest.raises(ConfigError, check=has_violations(*without_ddp, exactly=False)):
        hybrid_engine.attach(model.module, adam, example.CONFIG)
    no_megatron = has_violations(("model_chunks[0]", "not-a-megatron-model"), exactly=False)
    with pytest.raises(ConfigError, check=no_megatron):
        hybrid_engine.attach([torch.nn.Linear(1, 1)], None, example.CONFIG)
    differing = ("tensor_model_parallel_size", "params_dtype", "overlap_grad_reduce")
    other_sizes = [(f"actor_config.{key}", "differs-from-model") for key in differing]
    unknown = ("generate_config.infer_tensor_size", "unknown-key")
    wrong = {"actor_config": WRONG, "generate_config": {"infer_tensor_size": 1}}
    with pytest.raises(
        ConfigError, check=has_violations(*other_sizes, unknown, exactly=False)
    ) as caught:
        hybrid_engine.attach(model, optimizer, {**example.CONFIG, **wrong})
    assert all("use_distributed_optimizer" not in key for key, _ in violations_of(caught.value))


@contextmanager
def built() -> Iterator[tuple[Any, Any]]:
    """Build the example's model and optimizer in a new process group."""
    join_process_group(120)
    torch.manual_seed(0)
    with mock.patch.object(torch.distributed, "init_process_group"):
        model_and_optimizer = example.build_my_model()
    yield model_and_optimizer
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextmanager
def warnings_of_prepare() -> Iterator[list[str]]:
    """Collect the log messages of `hybrid_engine` in the block that name `prepare`."""
    kept = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "prepare" in record.getMessage():
                kept.append(record.getMessage())

    handler = Keeper()
    logger = logging.getLogger("hybrid_engine")
    logger.addHandler(handler)
    yield kept
    logger.removeHandler(handler)
