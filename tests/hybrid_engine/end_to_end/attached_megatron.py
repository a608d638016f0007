"""The example of a Megatron model, optimizer and loop of one's own, with an engine attached and without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from tests.harness.absent import left_out
from tests.harness.errors import violations_of
from tests.zoo.abilities import stored_and_loaded

NUM_ROUNDS, NUM_STEPS = 2, 4
VERIFIED = {**example.CONFIG["generate_config"], "verify": "full", "bucket_mb": 1, "kv_cache_mb": 16}
WRONG = {
    "tensor_model_parallel_size": 1,
    "params_dtype": "bfloat16",
    "use_distributed_optimizer": True,  # as it is
    "overlap_grad_reduce": True,
}


@dataclass
class Attached:
    """
    Attributes:
        plain, attached, unprepared: loss after as many steps as the example takes, and one more; the second and third
            with every weight of every switch compared.
        loose: the same where every parameter owns its memory, and moved once the optimizer was there.
        warned, warned_if_prepared: log messages without `prepare`, and with it.
        refused: (key, code) of the violations of models and configurations that do not fit.
        is_held_back: a forward pass in a rollout.
        keeps: weights that were stored and loaded.
        other_setting, state_after: of a switch while Megatron computes what config.json knows nothing of.
    """

    plain: list[float] = field(default_factory=list)
    attached: list[float] = field(default_factory=list)
    unprepared: list[float] = field(default_factory=list)
    loose: dict[str, list[float]] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    warned_if_prepared: list[str] = field(default_factory=list)
    refused: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    is_held_back: bool = False
    keeps: bool = False
    other_setting: str = ""
    state_after: str = ""


@left_out("hybrid_engine.trainer")  # the loop is the user's
def attach_and_train() -> dict[str, Any]:
    """An `Attached` as a dict. On two ranks; ends all process groups."""
    found = Attached()
    hybrid_engine.prepare().__exit__(None, None, None)  # the patches, for the parts without
    with built() as (model, optimizer):
        found.plain = [example.train(model, optimizer, NUM_STEPS) for _ in range(NUM_ROUNDS)]
        found.plain.append(example.train(model, optimizer, 1))
        found.refused = refusals(model, optimizer)
    for moved in (False, True):
        found.loose[f"{moved=}"] = loose_parameters(moved)
    with messages(found.warned_if_prepared), hybrid_engine.prepare(), built() as (model, optimizer):
        found.attached = rounds(model, optimizer, found)
    with messages(found.warned), built() as (model, optimizer):
        found.unprepared = rounds(model, optimizer, found)
    return asdict(found)


def rounds(model: torch.nn.Module, optimizer: Any, found: Attached) -> list[float]:
    """Losses of the rounds, and of a step once the engine is shut down."""
    engine = hybrid_engine.attach(model, optimizer, {**example.CONFIG, "generate_config": VERIFIED})
    config = model.module.config
    with mock.patch.object(config, "glu_linear_offset", 100.0), pytest.raises(ComputationError) as caught:
        engine.sharding.enter(State.INFER)
    found.other_setting, found.state_after = str(caught.value), engine.sharding.state.value
    losses = []
    for _ in range(NUM_ROUNDS):
        with engine.train_context():
            losses.append(example.train(model, optimizer, NUM_STEPS))
        with engine.rollout_context():
            answers = engine.generate(example.PROMPTS, hybrid_engine.Sampling(temperature=0.0, max_tokens=2))
            assert [len(one) for one in answers] == [1, 1]
            with pytest.raises(StateError):
                model(torch.zeros(1, 2, dtype=torch.int64), None, None)
            found.is_held_back = True
    found.keeps = stored_and_loaded(engine, model)
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
    """Of the same fields, but for the distributed optimizer."""
    return lambda **values: config(**{**values, "use_distributed_optimizer": False})


def refusals(model: Any, optimizer: Any) -> dict[str, list[tuple[str, str]]]:
    """Return (key, code) of each violation, by case; they are raised before anything is built."""
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
    """The example's model and optimizer, in a process group of their own."""
    join_process_group(120)
    torch.manual_seed(0)
    with mock.patch.object(torch.distributed, "init_process_group"):
        model_and_optimizer = example.build()
    yield model_and_optimizer
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextmanager
def messages(kept: list[str]) -> Iterator[None]:
    """What `hybrid_engine` logs in the block."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    handler = Keeper()
    logger = logging.getLogger("hybrid_engine")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
