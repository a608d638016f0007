"""The example of a user's own Megatron model, optimizer and loop, with and without an engine."""

from __future__ import annotations

import logging
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
from tests.harness.errors import violations_of
from tests.harness.imports import left_out
from tests.harness.values import Values
from tests.zoo.abilities import stored_and_loaded

NUM_ROUNDS = 2
NUM_STEPS = 4
VERIFIED = {**example.CONFIG["generate_config"], "verify": "full", "bucket_mb": 1, "kv_cache_mb": 16}
WRONG = {
    "tensor_model_parallel_size": 1,
    "params_dtype": "bfloat16",
    "use_distributed_optimizer": True,  # equal to the model's
    "overlap_grad_reduce": True,
}


@left_out("hybrid_engine.trainer")  # the loop is the user's
def attach_and_train() -> Values:
    """Return losses after each round of steps, log messages, and refusals.

    "attached" and "unprepared" have switches that compare all weights, "loose" parameters that own
    their memory. Runs on two ranks, and ends all process groups.
    """
    observed: Values = {"loose": {}, "warned": [], "warned_if_prepared": []}
    hybrid_engine.prepare().__exit__(None, None, None)  # applies the patches for the runs without an engine
    with built() as (model, optimizer):
        observed["plain"] = [example.train(model, optimizer, NUM_STEPS) for _ in range(NUM_ROUNDS)]
        observed["plain"].append(example.train(model, optimizer, 1))
        observed["refused"] = refusals(model, optimizer)
    for moved in (False, True):
        observed["loose"][f"{moved=}"] = loose_parameters(moved)
    with messages(observed["warned_if_prepared"]), hybrid_engine.prepare(), built() as (model, optimizer):
        observed["attached"] = rounds(model, optimizer, observed)
    with messages(observed["warned"]), built() as (model, optimizer):
        observed["unprepared"] = rounds(model, optimizer, observed)
    return observed


def rounds(model: torch.nn.Module, optimizer: Any, observed: Values) -> list[float]:
    """Return the losses of the rounds, and of a step after the engine was shut down."""
    engine = hybrid_engine.attach(model, optimizer, {**example.CONFIG, "generate_config": VERIFIED})
    config = model.module.config
    with mock.patch.object(config, "glu_linear_offset", 100.0), pytest.raises(ComputationError) as caught:
        engine.sharding.enter(State.INFER)
    observed["other_setting"] = str(caught.value)
    observed["state_after"] = engine.sharding.state.value
    losses = []
    for _ in range(NUM_ROUNDS):
        with engine.train_context():
            losses.append(example.train(model, optimizer, NUM_STEPS))
        with engine.rollout_context():
            completions = engine.generate(example.PROMPTS, hybrid_engine.Sampling(temperature=0.0, max_tokens=2))
            assert [len(samples) for samples in completions] == [1, 1]
            with pytest.raises(StateError):
                model(torch.zeros(1, 2, dtype=torch.int64), None, None)
            observed["is_held_back"] = True
    observed["keeps"] = stored_and_loaded(engine, model)
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


def refusals(model: Any, optimizer: Any) -> dict[str, list[tuple[str, str]]]:
    """Return (key, code) of each violation by case, all raised before anything is built."""
    adam = torch.optim.AdamW(model.parameters())
    calls: dict[str, Callable[[], object]] = {
        "without DDP": lambda: hybrid_engine.attach(model.module, adam, example.CONFIG),
        "no Megatron": lambda: hybrid_engine.attach([torch.nn.Linear(1, 1)], None, example.CONFIG),
        "other sizes": lambda: hybrid_engine.attach(
            model, optimizer, {**example.CONFIG, "actor_config": WRONG, "generate_config": {"infer_tensor_size": 1}}
        ),
    }
    violations = {}
    for name, call in calls.items():
        with pytest.raises(ConfigError) as caught:
            call()
        violations[name] = violations_of(caught.value)
    return violations


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
def messages(kept: list[str]) -> Iterator[None]:
    """Collect the log messages of `hybrid_engine` in the block."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    handler = Keeper()
    logger = logging.getLogger("hybrid_engine")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
