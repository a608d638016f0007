"""A transformers model sharded by FSDP2, with AdamW, and every public way to write it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import reshard
from hybrid_engine.config import HybridConfig
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.fsdp.actor import build_actor
from tests.hybrid_engine.backends.fsdp.test_lora import peft_model
from tests.walk.inference import build_engine
from tests.walk.oracle import Subject, Write, near_one
from tests.zoo import sharded_models
from tests.zoo.tiny_models import label_log_probs, token_batch

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
_BASE = ".base_layer.weight"


class Fsdp2(Subject):
    exact = True

    def __init__(
        self,
        path: Path,
        config: HybridConfig,
        job: Job,
        ends: ExitStack,
        *,
        lora: bool,
        serve: bool,
    ) -> None:
        table = config.table()
        trainer = None
        if lora:
            self.model: Any = sharded_models.shard(peft_model(path, LORA))
            self.optimizer = torch.optim.AdamW(
                [p for p in self.model.parameters() if p.requires_grad], lr=1e-2
            )
            train = ShardedModel(self.model, table, job.rank, [self.optimizer])
            ends.callback(train.close)
        else:
            trainer = build_actor(config, table, job, ends)
            train = trainer.engine.model
            self.model = train.model
            self.optimizer = trainer.engine.optimizer.inner
        engine, inference = build_engine(train, config, table, job, ends, serve=serve)
        super().__init__(
            engine, job, inference, exact=not lora and not serve, saves=not lora, trainer=trainer
        )
        self.vocab_size = table.dims.vocab_size
        self._seed = 0
        self.writes = self._writes()
        self.steps = self._steps()
        self.loads = {
            "load_state_dict": lambda parts: self.model.load_state_dict(
                self._as_state(parts), strict=False
            ),
            "set_model_state_dict": lambda parts: set_model_state_dict(
                self.model, self._as_state(parts), options=StateDictOptions(strict=False)
            ),
        }
        self.reads = {
            "state_dict": lambda: _locals(self.model.state_dict()),
            "get_model_state_dict": lambda: _locals(get_model_state_dict(self.model)),
            "optimizer.state_dict": self._optimizer_state_dict,
        }

    def named(self) -> TensorDict:
        # An interrupted forward pass leaves gathered parameters.
        reshard(self.model)
        return dict(self.model.named_parameters())

    def parameters(self) -> TensorDict:
        return _locals(self.named())

    def optimizer_state(self) -> TensorDict:
        names = {parameter: name for name, parameter in self.named().items()}
        return {
            f"{key} of {names[parameter]}": _local(value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }

    def canonical(self) -> TensorDict:
        whole = {name: _whole(tensor) for name, tensor in self.named().items()}
        if self.saves:
            return {name: whole[name] for name in self.inference.tensors}
        tensors = {}
        for name in self.inference.tensors:
            inner = f"base_model.model.{name}"
            base = inner.removesuffix(".weight") + _BASE
            if base not in whole:
                tensors[name] = whole[inner]
                continue
            a, b = (whole[base.replace(_BASE, f".lora_{letter}.default.weight")] for letter in "AB")
            tensors[name] = whole[base] + b @ a * (LORA["lora_alpha"] / LORA["r"])
        return tensors

    def forward(self) -> torch.Tensor:
        self._seed += 1
        batch = token_batch(100 * self._seed + self.job.rank, num_sequences=1, length=8)
        tokens, labels = (
            batch[name].to(self.job.device) % self.vocab_size for name in ("tokens", "labels")
        )
        return -label_log_probs(self.model(tokens).logits, labels).mean()

    def step(self) -> None:
        self.optimizer.step()

    def _writes(self) -> dict[str, Write]:
        return {
            **self.common_writes(),
            "p.copy_": lambda chance: (p := self._some(chance)).copy_(
                p.detach() * near_one(chance)
            ),
            "p.data.add_": lambda chance: self._some(chance).data.add_(0.01 * near_one(chance)),
            "init.normal_": lambda chance: torch.nn.init.normal_(
                self._some(chance), std=0.02 * near_one(chance)
            ),
            "foreach_add_": lambda chance: torch._foreach_add_(
                self._several(chance), 0.01 * near_one(chance)
            ),
            "foreach_lerp_": self._lerp,
            "to_local().copy_": lambda chance: (local := self._part(chance)).copy_(
                local * near_one(chance)
            ),
            "to_local().numpy()": lambda chance: (
                self._part(chance).numpy().__imul__(near_one(chance))
            ),
            "all_reduce into to_local": self._all_reduce,
            "broadcast into to_local": lambda chance: self._collect(
                chance, partial(dist.broadcast, src=0)
            ),
            "fused adamw on parts": partial(self._adamw, fused=True),
            "foreach adamw on parts": partial(self._adamw, foreach=True),
            "load_state_dict, doubled": lambda chance: self.model.load_state_dict(
                self._scaled(near_one(chance))
            ),
        }

    def _steps(self) -> dict[str, Write]:
        return {
            "step": self._trained(lambda: self.optimizer.step()),
            "step, unhooked": self._trained(
                lambda: type(self.optimizer).step.__wrapped__(self.optimizer)
            ),
            "step of a new optimizer": self._trained(
                lambda: torch.optim.SGD(self._trainable(), lr=0.1).step()
            ),
            "step of a new fused one": self._trained(
                lambda: torch.optim.AdamW(self._trainable(), fused=True).step()
            ),
            "moments": self._moments,
            "optimizer.load_state_dict": lambda chance: self.optimizer.load_state_dict(
                self.optimizer.state_dict()
            ),
        }

    def _trained(self, step: Callable[[], object]) -> Write:
        def run(_: random.Random) -> None:
            self.optimizer.zero_grad()
            self.forward().backward()
            step()

        return torch.enable_grad()(run)

    def _trainable(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.named().values() if parameter.requires_grad]

    def _moments(self, chance: random.Random) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"].mul_(near_one(chance))

    def _scaled(self, factor: float) -> TensorDict:
        return {name: tensor.detach() * factor for name, tensor in self.model.state_dict().items()}

    def _part(self, chance: random.Random) -> torch.Tensor:
        return _local(self._some(chance))

    def _lerp(self, chance: random.Random) -> None:
        several = self._several(chance)
        torch._foreach_lerp_(several, [tensor * near_one(chance) for tensor in several], 0.5)

    def _collect(self, chance: random.Random, collective: Callable[[torch.Tensor], object]) -> None:
        """Run `collective` on this rank's part of a tensor, as users who average weights do."""
        tensor = self._some(chance)
        if _is_even(tensor):
            collective(_local(tensor))

    def _all_reduce(self, chance: random.Random) -> None:
        if _is_even(tensor := self._some(chance)):
            dist.all_reduce(_local(tensor))
            _local(tensor).div_(self.job.world_size)

    def _adamw(self, chance: random.Random, **kernel: bool) -> None:
        parts = [part for part in map(_local, self._several(chance)) if part.numel()]
        zeros = [torch.zeros_like(part) for part in parts]
        adamw(
            parts,
            [torch.full_like(part, near_one(chance)) for part in parts],
            zeros,
            [zero.clone() for zero in zeros],
            [],
            [torch.zeros((), device=self.job.device) for _ in parts],
            **kernel,
            **{
                "amsgrad": False,
                "beta1": 0.9,
                "beta2": 0.99,
                "lr": 0.01,
                "weight_decay": 0.0,
                "eps": 1e-8,
            },
            maximize=False,
        )

    def _as_state(self, parts: Batch) -> TensorDict:
        parameters = self.named()
        return {name: _sharded_like(parameters[name], part) for name, part in parts.items()}

    def _optimizer_state_dict(self) -> TensorDict:
        state = self.optimizer.state_dict()
        names = {p: name for name, p in self.named().items()}
        order = [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        return {
            f"{key} of {order[index]}": _local(value)
            for index, values in state["state"].items()
            for key, value in values.items()
        }


def _is_even(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) or tensor.shape[0] % tensor.device_mesh.size() == 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _locals(tensors: Mapping[str, Any]) -> TensorDict:
    return {name: _local(tensor) for name, tensor in tensors.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _sharded_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
