"""What the trainers' backends share: guards of state that is off the device, and facts about flat buffers.

Hooks refuse access to training state while it is off the device:

    forward pass, `state_dict`, `load_state_dict` of a model and of each module in it      parameters
    `step`, `state_dict`, `load_state_dict` of an optimizer                                everything

So whatever saves by these (save_pretrained, torch.distributed.checkpoint, Megatron's `sharded_state_dict`) is refused,
too. A parameter or a moment that is read or written itself is not: torch has no hook there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hybrid_engine.errors import ReshardError, WeightError
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.memory.offload_items import KINDS, Guards, OffloadItem
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region

_ALIGNMENT = 16  # bytes: kernels that load several elements at once want it, and no element is larger

Guard = Callable[[Iterable[str]], None]
"""Called with kinds of training state; raises StateError where they may be off the device."""


class GuardedState:
    """Base of trainers (port `Trainer`), whose state may leave the device.

    Attributes:
        guard: called with the kinds of state that a call is about to use; whoever moves them is asked.
        before_step: called once before each optimizer step, however many optimizers take part in it.
    """

    guard: Guards
    before_step: Callable[[], object]

    def __init__(self) -> None:
        self.guard, self.before_step = Guards(), lambda: None
        self._num_begun: dict[torch.optim.Optimizer, int] = {}  # steps
        self._ends = ExitStack()
        weakref.finalize(self, self._ends.close)

    def close(self) -> None:
        """Let models and optimizers be their owner's alone, or another engine's; idempotent."""
        self._ends.close()
        self.guard, self.before_step = Guards(), lambda: None

    @property
    def unserved(self) -> Collection[str]:
        """Canonical tensors that are trained and that the inference engine does not read: none, unless overridden."""
        return ()

    @property
    def frozen(self) -> Collection[str]:
        """Canonical tensors that no step changes: none are known, unless overridden."""
        return ()

    def reload_main_params(self) -> None:
        """Nothing, unless an optimizer has copies of the parameters that it steps on."""

    def watch(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have `guard` called by whatever needs the state of these, while this object is there and not closed; and
        `before_step` by their steps."""
        own = weakref.ref(self)

        def guard(kinds: Iterable[str]) -> None:
            if (state := own()) is not None:
                state.guard(kinds)

        def begin_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (state := own()) is not None:
                state._begin_step(optimizer)

        for model in models:
            self._remove_at_end(guard_model(model, guard))
        for optimizer in optimizers:
            self._num_begun[optimizer] = steps_before(optimizer, self._num_begun)
            self._remove_at_end(guard_optimizer(optimizer, guard))
            self._remove_at_end([optimizer.register_step_pre_hook(begin_step)])

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that has begun fewer steps than another takes part in one that is under way."""
        if self._num_begun[optimizer] == max(self._num_begun.values()):
            self.before_step()
        self._num_begun[optimizer] += 1

    def _remove_at_end(self, handles: Iterable[RemovableHandle]) -> None:
        for handle in handles:
            self._ends.callback(handle.remove)


def steps_before(optimizer: torch.optim.Optimizer, counts: Mapping[torch.optim.Optimizer, int]) -> int:
    """Steps of optimizers that step on the same parameters, which it replaces; others take part in steps with it."""
    own = {id(each) for each in stepped_by(optimizer)}
    return max((count for other, count in counts.items() if own & {id(each) for each in stepped_by(other)}), default=0)


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer steps on."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def guard_model(model: torch.nn.Module, guard: Guard) -> Iterator[RemovableHandle]:
    """Have `guard` called whenever the model, or a module in it, is asked for what needs its parameters."""
    own = weakref.WeakSet(model.modules())  # a copy of the model has its hooks, and parameters of its own

    def needs_parameters(module: torch.nn.Module, *_: Any) -> None:
        if module in own:
            guard(["param"])

    # before FSDP2's own, which gathers parameters
    yield model.register_forward_pre_hook(needs_parameters, prepend=True)
    for module in model.modules():
        yield module.register_state_dict_pre_hook(needs_parameters)
        yield module.register_load_state_dict_pre_hook(needs_parameters)


def guard_optimizer(optimizer: torch.optim.Optimizer, guard: Guard) -> Iterator[RemovableHandle]:
    """Have `guard` called whenever the optimizer steps, and when its state is read or written as a whole."""

    def needs_all(*_: Any) -> None:
        guard(KINDS)

    yield optimizer.register_step_pre_hook(needs_all)
    yield optimizer.register_state_dict_pre_hook(needs_all)
    yield optimizer.register_load_state_dict_pre_hook(needs_all)


class WholeTensors:
    """Weights that lie whole on this rank, as in a replicated model (port `TrainingWeights`, and all around it).

    They move into one elastic buffer for each dtype, whose memory comes and goes page by page and which peers on the
    host can read. Parameters stay the same objects, so that an optimizer may refer to them already.

    Args:
        tensors: by their names in a checkpoint, on the device. One that has two names, as a tied head, counts once.
        rank: of this process in the job.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
        self.rank = rank
        first_names: dict[int, str] = {}
        self.tensors = {name: one for name, one in tensors.items() if first_names.setdefault(id(one), name) == name}
        self._flat: dict[str, torch.Tensor] = {}
        self._places: dict[str, Place] = {}
        parts = parts_in_elastic_buffers([tensor.data for tensor in self.tensors.values()])
        for (name, tensor), part in zip(self.tensors.items(), parts, strict=True):
            buffer = BufferId(rank, f"weights in {dtype_name(part)}")
            self._flat.setdefault(buffer.name, flat_storage_of(part))
            self._places[name] = Place(buffer, int(part.storage_offset()), tuple(part.stride()))
            tensor.data = part

    def layout(self) -> Layout:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        shards = [Shard(Region(name, (0,) * len(shape), shape), self._places[name]) for name, shape in shapes.items()]
        return layout_in(self._flat, self.rank, shapes, shards)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._flat

    def offload_items(self) -> Iterator[OffloadItem]:
        yield from (OffloadItem(name, "param", flat) for name, flat in self._flat.items())

    def prepare(self) -> None:
        """Raise ReshardError if tensors moved since the layout was made: a switch would read stale memory."""
        for name, tensor in self.tensors.items():
            flat, place = self._flat[self._places[name].buffer.name], self._places[name]
            if tensor.data_ptr() != flat.data_ptr() + place.offset * flat.element_size():
                raise ReshardError(f"{name} moved since the engine was built. Offload through the engine, not by .data")

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        require_usable_values(read_parts(self._flat, unread or {}), self.tensors.items)

    @property
    def base(self) -> WholeTensors:
        return self

    @property
    def merged(self) -> WholeTensors:
        return self

    def zero_padding(self) -> None:
        """Nothing: what no weight covers is never read."""

    def zero_adapters(self) -> None:
        """Nothing: there are none."""


def parts_in_elastic_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors; those of one dtype lie one after the other in one elastic buffer.

    One for all of a dtype, since each takes whole pages and a file descriptor.
    """
    parts = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [index for index, tensor in enumerate(tensors) if tensor.dtype is dtype]
        step = _ALIGNMENT // dtype.itemsize
        *starts, end = accumulate((-(-tensors[index].numel() // step) * step for index in same), initial=0)
        flat = allocate_elastic(end, dtype, tensors[same[0]].device, "param")
        for index, start in zip(same, starts, strict=True):
            tensor = tensors[index]
            parts[index] = flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
    return parts


def flat_storage_of(local: torch.Tensor) -> torch.Tensor:
    """All of the storage in which a local tensor lies, as a flat one of its dtype."""
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())


def runs_by_buffer(shards: Sequence[Shard]) -> dict[str, list[Extent]]:
    """By buffer, the elements from each shard's first to its last: parameters are dense and cut along their rows, so
    shards hold all of these."""
    runs: dict[str, list[Extent]] = {}
    for shard in shards:
        extent = shard.place.extent(shard.region.lengths)
        runs.setdefault(shard.place.buffer.name, []).append(extent)
    return runs


def gaps(numel: int, runs: Sequence[Extent]) -> tuple[Extent, ...]:
    """What no run covers of a buffer: ends of buckets, padding of the vocabulary, what aligns a parameter."""
    found, end = [], 0
    for run in (*sorted(runs), Extent(numel, numel)):
        if run.start > end:
            found.append(Extent(end, run.start))
        end = max(end, run.stop)
    return tuple(found)


def layout_in(
    buffers: Mapping[str, torch.Tensor], rank: int, shapes: Mapping[str, tuple[int, ...]], shards: Sequence[Shard]
) -> Layout:
    """The layout of shards in these flat buffers, by name; padding is what no shard covers."""
    runs = runs_by_buffer(shards)
    records = {}
    for name, flat in buffers.items():
        padding, exported = gaps(flat.numel(), runs.get(name, ())), exported_buffer_of(flat) is not None
        records[BufferId(rank, name)] = Buffer(flat.numel(), dtype_name(flat), padding=padding, exported=exported)
    return Layout(shapes, records, tuple(shards))


def is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def dtype_name(tensor: torch.Tensor) -> str:
    """Of a tensor's elements, as records have it."""
    return str(tensor.dtype).removeprefix("torch.")


def read_parts(buffers: Mapping[str, torch.Tensor], unread: Mapping[str, Sequence[Extent]]) -> Iterator[torch.Tensor]:
    """The buffers without the intervals that nobody reads."""
    for name, flat in buffers.items():
        yield from (flat[part.start : part.stop] for part in gaps(flat.numel(), unread.get(name, ())))


def require_usable_values(
    buffers: Iterable[torch.Tensor], parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]
) -> None:
    """Raise WeightError naming every parameter that holds a NaN or an infinity. Reads each buffer once.

    `parameters`: (what a message calls it, its elements on this rank), asked for where a buffer is at fault: there may
    be something in its padding alone.
    """
    if all(_is_finite(tensor) for tensor in buffers):
        return
    findings = [
        f"{name}: {problem} of {tensor.numel()} elements"
        for name, tensor in parameters()
        if (problem := _unusable_values(tensor.detach()))
    ]
    if findings:
        raise WeightError(findings)


def require_finite_to_save(tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
    """Raise WeightError naming each of what is to be saved, (name, elements on this rank), that is not finite."""
    try:
        require_usable_values((tensor for _, tensor in tensors()), tensors)
    except WeightError as error:
        raise WeightError([*error.findings, "go back to a checkpoint, or save them with check_nan=False"]) from None


def _is_finite(tensor: torch.Tensor) -> bool:
    # the sum is the fastest look, but it may overflow where no element does
    if not tensor.numel() or tensor.sum().isfinite():
        return True
    return all(bool(value.isfinite()) for value in tensor.aminmax())


def _unusable_values(tensor: torch.Tensor) -> str:
    """ "3 NaN, 1 Inf", or nothing when every element is finite."""
    counts = {"NaN": int(tensor.isnan().sum()), "Inf": int(tensor.isinf().sum())}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
