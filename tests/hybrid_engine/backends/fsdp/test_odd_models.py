"""Unusual models and optimizers of users.

Records locate every element, switches leave training bitwise unchanged, and nothing reads or writes
training state while a publisher has offloaded it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import flat_storage_of, local_of
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm.support import differences
from tests.hybrid_engine.serving.publishing import calls_while_published
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.megatron_models import region_slices, view_of
from tests.zoo.sharded_models import decoder_layers, from_config, shard, shard_over_tensor_parallel

NUM_STEPS = 2
Optimizers = Sequence[torch.optim.Optimizer]


def adamw(model: torch.nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


@dataclass(frozen=True)
class Odd:
    """An unusual model with its optimizers.

    Attributes:
        make: builds a sharded model from the directory of its config.
        optimizers: builds the optimizers of a model.
        config: changes of config.json.
        micro_batches: number accumulated for a step.
        tensor_parallel_size: ranks that compute the same rows.
    """

    make: Callable[[Path], torch.nn.Module] = lambda path: shard(from_config(path))
    optimizers: Callable[[torch.nn.Module], Optimizers] = adamw
    config: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    tensor_parallel_size: int = 1


def with_options(**options: Any) -> Callable[[Path], torch.nn.Module]:
    return lambda path: shard(from_config(path), **options)


def checkpointed(path: Path) -> torch.nn.Module:
    model: Any = from_config(path)
    model.gradient_checkpointing_enable()
    return shard(model.train())


def wrapped(wrap: Callable[[torch.nn.Module], Any]) -> Callable[[Path], torch.nn.Module]:
    """Wrap each layer before it is sharded."""

    def make(path: Path) -> torch.nn.Module:
        model = from_config(path)
        layers = decoder_layers(model)
        for index, layer in enumerate(layers):
            layers[index] = wrap(layer)
        return shard(model)

    return make


def from_meta(path: Path) -> torch.nn.Module:
    """Shard a model on the meta device, then allocate it and copy another model's weights."""
    with torch.device("meta"):
        model = from_config(path)
    shard(model).to_empty(device="cpu")
    whole = from_config(path)
    with torch.no_grad():
        for parameter, source in zip(
            model.parameters(), shard(from_config(path)).parameters(), strict=True
        ):
            local_of(parameter).copy_(local_of(source))
        for buffer, source in zip(model.buffers(), whole.buffers(), strict=True):
            buffer.copy_(source)
    return model


class Nested(torch.optim.SGD):
    """SGD with nested state, of tensors and a scalar tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "moments" not in state:
                    zeros = torch.zeros_like(parameter)
                    state["moments"] = {"of": [zeros, zeros.clone()], "count": torch.tensor(0.0)}
                state["moments"]["of"][0].add_(parameter, alpha=0.1)
                state["moments"]["count"] += 1
                parameter.add_(state["moments"]["of"][0], alpha=-1e-3)


def two_optimizers(model: torch.nn.Module) -> Optimizers:
    small = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    large = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [torch.optim.SGD(small, lr=1e-2), torch.optim.AdamW(large, lr=1e-2)]


def optimizer_of(
    kind: type[torch.optim.Optimizer], **settings: Any
) -> Callable[[torch.nn.Module], Optimizers]:
    return lambda model: [kind(model.parameters(), **settings)]


TWO_RANKS = {
    "resharded after forward": Odd(with_options(reshard_after_forward=True)),
    "by columns": Odd(
        with_options(shard_placement_fn=lambda parameter: Shard(int(parameter.dim() > 1)))
    ),
    "kept after forward": Odd(with_options(reshard_after_forward=False), micro_batches=2),
    "computes in bfloat16": Odd(
        with_options(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ),
    "uneven, and fewer rows than ranks": Odd(config={"intermediate_size": 1, "vocab_size": 131}),
    "accumulated": Odd(micro_batches=3),
    "gradient checkpointing": Odd(checkpointed),
    # Computed again, a layer would append its keys to a cache that has them.
    "checkpoint wrapper": Odd(wrapped(checkpoint_wrapper), config={"use_cache": False}),
    "compiled": Odd(wrapped(lambda layer: torch.compile(layer, backend="eager"))),
    "from meta": Odd(from_meta),
    "cpu offload": Odd(with_options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "fused": Odd(optimizers=optimizer_of(torch.optim.AdamW, lr=1e-2, fused=True)),
    "foreach": Odd(optimizers=optimizer_of(torch.optim.AdamW, lr=1e-2, foreach=True)),
    "momentum": Odd(optimizers=optimizer_of(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    "nested state": Odd(optimizers=optimizer_of(Nested, lr=1e-2)),
    "two optimizers": Odd(optimizers=two_optimizers),
}
FOUR_RANKS = {
    "tensor parallel": Odd(
        lambda path: shard_over_tensor_parallel(from_config(path)), tensor_parallel_size=2
    ),
    "fewer rows than ranks": Odd(config={"intermediate_size": 3, "vocab_size": 129}),
}


@on_engines({2: TWO_RANKS, 4: FOUR_RANKS})
def test_odd_models_are_read_correctly_and_train_unchanged(tmp_path: Path, case: str) -> None:
    odd = (TWO_RANKS | FOUR_RANKS)[case]
    with closing(Job.join(120)) as job:
        if job.rank == 0:
            write_config(tmp_path, served_config("llama", torch_dtype="float32", **odd.config))
        job.agreement.conclude("writing the config")  # other ranks read it next
        model = odd.make(tmp_path)
        optimizers = odd.optimizers(model)
        driven = ShardedModel(model, table_for(read_config(tmp_path)), job.rank, optimizers)
        offloader = Offloader(driven)
        for step in range(NUM_STEPS):
            _train(odd, model, optimizers, 10 * step + job.rank // odd.tensor_parallel_size)
            assert all(offloader.offload([kind]) for kind in KINDS)  # every kind must leave
            offloader.onload()
            driven.weights.prepare()
            _check_places(driven)
        weights = model.state_dict()
        moments = optimizers[0].state_dict()
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: model(torch.zeros(1, 4, dtype=torch.int64)),
            "state_dict": model.state_dict,
            "load_state_dict": lambda: model.load_state_dict(weights),
            "step": optimizers[0].step,
            "state_dict of an optimizer": optimizers[0].state_dict,
            "load_state_dict of an optimizer": lambda: optimizers[0].load_state_dict(moments),
        }
        assert calls_while_published(driven, driven.table.shapes, job, calls) == []
        other = odd.make(tmp_path)
        other_optimizers = odd.optimizers(other)
        for step in range(NUM_STEPS):
            _train(odd, other, other_optimizers, 10 * step + job.rank // odd.tensor_parallel_size)
        state = _state(model, optimizers)
        expected = _state(other, other_optimizers)
        assert differences(state, expected) == []


def _train(odd: Odd, model: Any, optimizers: Optimizers, seed: int) -> None:
    """Train one step; gradients are kept until the next step."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for number in range(odd.micro_batches):
        # Gradients are reduced once per step.
        model.set_requires_gradient_sync(number == odd.micro_batches - 1)
        generator = torch.Generator().manual_seed(100 * number + seed)
        tokens = torch.randint(0, 128, (2, 8), generator=generator)
        model(tokens).logits.float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def _check_places(driven: ShardedModel) -> None:
    """Check that every record points at the elements of the whole tensor."""
    weights = driven.weights
    whole = {name: _whole(tensor) for name, tensor in weights.tensors.tensors.items()}
    buffers = {name: flat_storage_of(flat) for name, flat in weights.buffers().items()}
    for record in weights.layout().shards:
        packed = weights.packed[record.region.tensor]
        tensor = whole[packed.parameter].as_strided(
            packed.view.shape, packed.view.strides, packed.view.offset
        )
        assert torch.equal(tensor[region_slices(record)], view_of(buffers, record)), record


def _whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).contiguous().clone()


def _state(model: torch.nn.Module, optimizers: Optimizers) -> TensorDict:
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = local_of(parameter)
        if parameter.grad is not None:
            state[f"{name}.grad"] = local_of(parameter.grad)
        for number, optimizer in enumerate(optimizers):
            tensors = torch.utils._pytree.tree_leaves(optimizer.state.get(parameter, {}))
            leaves = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
            state |= {
                f"{name}, {number}, {index}": local_of(leaf) for index, leaf in enumerate(leaves)
            }
    return state
