"""During and after a rollout, calls that read or write the model are correct or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from hybrid_engine import HybridEngine
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.zoo import sharded_models, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Calls = dict[str, Callable[[], object]]


def refusals(calls: Calls) -> dict[str, str]:
    """Return the messages of the calls that are refused, by name."""
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except StateError as error:
            messages[name] = str(error)
    return messages


def check(engine: HybridEngine, calls: Calls, state: Callable[[], list[torch.Tensor]]) -> None:
    """Check calls in a rollout, after it, and in `train_context`."""
    with engine.train_context():
        before = [tensor.clone() for tensor in state()]
    with engine.rollout_context():
        inside = refusals(calls)
    for messages in (inside, refusals(calls)):
        assert messages.keys() == calls.keys()
        assert all("train_context" in message for message in messages.values()), messages
    with engine.train_context():
        assert all(map(torch.equal, state(), before))
        assert refusals(calls) == {}


def gathered(model: torch.nn.Module) -> TensorDict:
    """Return the weights in the form that transformers can save."""
    tensors = model.state_dict().items()
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors
    }


def uses(parameters: list[torch.nn.Parameter], moment: torch.Tensor) -> Calls:
    """Return uses of tensors that no hook of a module or an optimizer sees, and that change
    nothing.
    """
    return {
        "write": lambda: parameters[0].data.add_(0),
        "norm": lambda: sum(parameter.norm() for parameter in parameters),
        "copy of all": lambda: torch._foreach_mul(parameters, 0.9),
        "parameters_to_vector": lambda: parameters_to_vector(parameters[:1]),
        "deepcopy": lambda: copy.deepcopy(parameters[0]),
        "torch.save": lambda: torch.save(parameters[0], io.BytesIO()),
        "a moment": lambda: moment * 2,
        "torch.save of a moment": lambda: torch.save(moment, io.BytesIO()),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("outside") / "model", "qwen3")


@on_engines(1)
def test_training_state_of_megatron_is_refused_until_it_returns(directory: Path) -> None:
    worker = workers.build_worker(directory, {}, {})
    with worker.train_context():
        worker.update(workers.batch(seed=0), workers.cross_entropy)
        (chunk,) = worker.train.chunks
        optimizer = worker.train.optimizer
        whole = {
            name: value
            for name, value in chunk.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        whole = {name: tensor.clone() for name, tensor in whole.items()}
    calls = {
        "state_dict": chunk.state_dict,
        "sharded_state_dict": lambda: chunk.module.sharded_state_dict(),
        "load_state_dict": lambda: chunk.load_state_dict(whole, strict=False),
        "step": optimizer.step,
        "optimizer.state_dict": optimizer.state_dict,
        "save_checkpoint of the worker": lambda: worker.save_checkpoint(directory / "checkpoint"),
    }
    parameters = [*chunk.parameters()]
    calls |= uses(parameters, next(iter(optimizer.optimizer.state.values()))["exp_avg"])
    check(worker, calls, lambda: [parameter.detach() for parameter in parameters])
    worker.shutdown()


@on_engines(1)
def test_training_state_of_fsdp_is_refused_until_it_returns(directory: Path) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharded_models.from_config(directory)
    engine = HybridEngine(
        model=model,
        rollout_config={"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16},
        train_config={},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(8)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    with engine.train_context():
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moments = optimizer.state_dict()
    calls = {
        "state_dict": model.state_dict,
        "state_dict of a layer": model.model.layers[0].state_dict,
        "load_state_dict": lambda: model.load_state_dict(whole),
        "save_pretrained": lambda: model.save_pretrained(
            directory / "saved", state_dict=gathered(model)
        ),
        "torch.distributed.checkpoint": lambda: get_model_state_dict(model),
        "forward": lambda: model(tokens),
        "step": optimizer.step,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(moments),
        "full_tensor": lambda: next(model.parameters()).full_tensor(),
        "to_local of a moment": lambda: next(iter(optimizer.state.values()))["exp_avg"].to_local(),
        **uses([*model.parameters()], next(iter(optimizer.state.values()))["exp_avg"]),
    }
    state = [*model.parameters()]
    for moments_of_parameter in optimizer.state.values():
        state += moments_of_parameter.values()
    check(engine, calls, lambda: [local_of(tensor) for tensor in state])
    engine.shutdown()
