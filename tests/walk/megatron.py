"""A Megatron model with DDP and the distributed optimizer, and every way to write it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.attaching.attachment import apply_patches
from hybrid_engine.config import HybridConfig
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.walk.inference import build_engine
from tests.walk.oracle import Subject, Write, near_one
from tests.zoo import workers
from tests.zoo.megatron_models import whole_weights


class Megatron(Subject):
    def __init__(self, config: HybridConfig, job: Job, ends: ExitStack, *, serve: bool) -> None:
        apply_patches()
        from hybrid_engine.trainer.megatron.actor import build_actor

        table = config.table()
        trainer = build_actor(config, table, job, ends)
        train = trainer.engine.model
        self.chunks = train.chunks
        self.optimizer = train.optimizer
        engine, inference = build_engine(train, config, table, job, ends, serve=serve)
        super().__init__(engine, job, inference, exact=not serve, trainer=trainer)
        self.vocab_size = table.dims.vocab_size
        self._seed = 0
        self.writes = self._writes()
        self.steps = self._steps()
        self.loads = {"load_state_dict": self._load}
        self.reads = {
            "state_dict": lambda: self._shown(self.chunks[0].state_dict()),
            "optimizer.state_dict": self._optimizer_state_dict,
        }

    def named(self) -> TensorDict:
        return {
            f"chunk{number}.{name.replace('module.', '')}": tensor
            for number, chunk in enumerate(self.chunks)
            for name, tensor in chunk.named_parameters()
        }

    def parameters(self) -> TensorDict:
        return {name: tensor.detach() for name, tensor in self.named().items()}

    def optimizer_state(self) -> TensorDict:
        state = {}
        model_storages = {
            parameter.untyped_storage().data_ptr() for parameter in self.named().values()
        }
        for number, optimizer in enumerate(self._members()):
            adam = optimizer.optimizer
            parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(parameters):
                # For float32 parameters the main parameters are the model's.
                if parameter.untyped_storage().data_ptr() not in model_storages:
                    state[f"main parameter {number}.{index}"] = parameter.detach()
                for key, value in adam.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        state[f"{key} of main parameter {number}.{index}"] = value
        return state

    def canonical(self) -> TensorDict:
        weights = self.engine.train.weights.merged
        weights.prepare()  # Adds LoRA adapters, if any.
        whole = whole_weights(weights)
        dtype = getattr(torch, self.inference.dtype)
        return {name: whole[name].to(self.job.device, dtype) for name in self.inference.tensors}

    def forward(self) -> torch.Tensor:
        return self.trainer.engine.log_probs(self._share())

    def step(self) -> None:
        self.optimizer.step()

    def _share(self) -> TensorDict:
        """Return this rank's share of a new batch, the same on all tensor parallel ranks."""
        self._seed += 1
        limits = self.trainer.engine.limits
        batch = workers.batch(seed=self._seed)
        return {
            name: rows.chunk(limits.dp_size)[limits.dp_rank] % self.vocab_size
            for name, rows in batch.items()
        }

    def _writes(self) -> dict[str, Write]:
        return {
            **self.common_writes(),
            "p.data.mul_": lambda chance: self._some(chance).data.mul_(near_one(chance)),
            "p.data.copy_": lambda chance: (p := self._some(chance)).data.copy_(
                p.detach() * near_one(chance)
            ),
            "foreach_mul_ on .data": lambda chance: torch._foreach_mul_(
                [parameter.data for parameter in self._several(chance)], near_one(chance)
            ),
            "flat param_data": lambda chance: chance.choice(list(self._buffers())).param_data.mul_(
                near_one(chance)
            ),
            "all_reduce into p.data": self._all_reduce,
            "load_state_dict, scaled": self._load_scaled,
            "load_hf_checkpoint's way": self._through_records,
        }

    def _steps(self) -> dict[str, Write]:
        return {
            "step": lambda chance: self.trainer.engine.train_step(
                self._share(), workers.cross_entropy
            ),
            "optimizer.step": self._with_gradients(lambda: self.optimizer.step()),
            "half steps": self._with_gradients(lambda: self._half_steps([self.optimizer])),
            "half steps of the chain": self._with_gradients(
                lambda: self._half_steps(self._members())
            ),
            "steps of the chain": self._with_gradients(
                lambda: [member.step() for member in self._members()]
            ),
            "main params, copied": self._main_parameters,
            "reload_model_params": lambda chance: self.optimizer.reload_model_params(),
            "moments": self._moments,
        }

    def _members(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from (
                buffer
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
                if buffer.param_data is not None
            )

    def _with_gradients(self, step: Callable[[], object]) -> Write:
        def run(chance: random.Random) -> None:
            gradient = 0.01 * near_one(chance)
            for chunk in self.chunks:
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                    buffer.grad_data.fill_(gradient)
            step()

        return run

    def _half_steps(self, optimizers: list[Any]) -> None:
        for optimizer in optimizers:
            assert not optimizer.prepare_grads()
            assert optimizer.step_with_ready_grads()

    def _main_parameters(self, chance: random.Random) -> None:
        factor = near_one(chance)
        for optimizer in self._members():
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(factor)
            optimizer._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def _moments(self, chance: random.Random) -> None:
        for optimizer in self._members():
            for state in optimizer.optimizer.state.values():
                if "exp_avg" in state:
                    state["exp_avg"].mul_(near_one(chance))

    def _all_reduce(self, chance: random.Random) -> None:
        # Averages replicas, and mixes sharded parameters, which is a write like any other.
        parameter = self._some(chance)
        parameter.data.mul_(near_one(chance))
        if self.trainer.engine.limits.dp_size == self.job.world_size:
            dist.all_reduce(parameter.data)
            parameter.data.div_(self.job.world_size)

    def _load_scaled(self, chance: random.Random) -> None:
        factor = near_one(chance)
        self._load({name: tensor * factor for name, tensor in self.parameters().items()})

    def _load(self, parts: Batch) -> None:
        for number, chunk in enumerate(self.chunks):
            prefix = f"chunk{number}."
            state = {
                name.removeprefix(prefix): part
                for name, part in parts.items()
                if name.startswith(prefix)
            }
            chunk.load_state_dict(state, strict=False)

    def _through_records(self, chance: random.Random) -> None:
        """Write the flat buffers, as the import of another checkpoint format does."""
        factor = near_one(chance)
        for flat in self.engine.train.weights.base.buffers().values():
            flat.mul_(factor)

    def _shown(self, state: Mapping[str, Any]) -> TensorDict:
        return {
            f"chunk0.{name}": value
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def _optimizer_state_dict(self) -> TensorDict:
        """Return the inner optimizers' state dicts, from which Megatron makes checkpoints."""
        if any(
            optimizer.optimizer.state for optimizer in self._members()
        ):  # Megatron fails without state.
            self.optimizer.state_dict()
        tensors = {}
        for number, optimizer in enumerate(self._members()):
            for index, state in optimizer.optimizer.state_dict()["state"].items():
                tensors |= {
                    f"{key} of main parameter {number}.{index}": value
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor)
                }
        return tensors
