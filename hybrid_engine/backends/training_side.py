"""Shared code of the training backends: guards of offloaded state, and layouts in flat buffers.

Hooks refuse access to training state while it is off the device, and wait for state that is on its
way back:

    hook                                                                             state
    forward pass of a model; `state_dict` and `load_state_dict` of its modules       parameters
    `step`, `state_dict` and `load_state_dict` of an optimizer                       all
    `METHODS_WITH_STATE` of Megatron's optimizers                                    all

They also cover code that saves through these methods: save_pretrained,
torch.distributed.checkpoint, Megatron's `sharded_state_dict`. They do not cover a direct access to
a parameter or a moment, because torch has no hook there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hybrid_engine.compute_check.fingerprint import Fingerprint
from hybrid_engine.errors import HybridEngineError, WeightError
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.memory.offload_items import KINDS, Guards, OffloadItem
from hybrid_engine.ports import GuardedTrainer, TrainingWeights
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, Shapes
from hybrid_engine.transports.copies import FlatBuffers

_ALIGNMENT = 16
"""Alignment of parts of a buffer, in bytes.

Kernels with vectorized loads need it, and no element is larger.
"""

Guard = Callable[[Iterable[str]], None]
"""Function that takes kinds of training state, and raises StateError if they are off the device.

It waits for kinds that are on their way back.
"""
Modules = Sequence[torch.nn.Module]
"""Modules of a trainer on this rank: a whole model, or the chunks of its pipeline stages."""
NamedTensor = tuple[str, torch.Tensor]
Origins = Mapping[str, Sequence[torch.Tensor]]
"""Name of a tensor that is sent -> parameters and buffers that it is read or computed from."""


class GuardedState(GuardedTrainer):
    """Base class of trainers (port `Trainer`) with state that may leave the device."""

    def __init__(self) -> None:
        self.guard = Guards()
        self.before_step: Callable[[], object] = lambda: None
        self._num_steps_begun: dict[torch.optim.Optimizer, int] = {}
        self._cleanup = ExitStack()
        # The models and optimizers may outlive this object, but its hooks must not.
        weakref.finalize(self, self._cleanup.close)

    def training_fault(self) -> HybridEngineError | None:
        """Call `guard`; return its error, such as that of a late copy, for all ranks to raise."""
        try:
            self.guard(KINDS)
        except HybridEngineError as error:
            return error
        return None

    def close(self) -> None:
        """Remove all hooks from models and optimizers; idempotent."""
        self._cleanup.close()
        self.guard = Guards()
        self.before_step = lambda: None

    def watch(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        methods: Iterable[tuple[object, str]] = (),
    ) -> None:
        """Call `guard` before any use of the state of these, and `before_step` before their steps.

        Ends when this object is closed or garbage-collected.

        Args:
            models: need their parameters.
            optimizers: need all state.
            methods: objects and names of their methods that need all state and have no hooks.
        """
        models = list(models)
        optimizers = list(optimizers)
        self.guard.reach([*models, *optimizers])
        # The hooks must not keep this object alive.
        self_ref = weakref.ref(self)

        def guard(kinds: Iterable[str]) -> None:
            if (state := self_ref()) is not None:
                state.guard(kinds)

        def begin_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (state := self_ref()) is not None:
                state._begin_step(optimizer)

        for model in models:
            self._remove_at_end(guard_model(model, guard))
        for optimizer in optimizers:
            self._num_steps_begun[optimizer] = steps_before(optimizer, self._num_steps_begun)
            self._remove_at_end(guard_optimizer(optimizer, guard))
            self._remove_at_end([optimizer.register_step_pre_hook(begin_step)])
        for owner, name in methods:
            self._cleanup.callback(guard_method(owner, name, guard))

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        # An optimizer that has begun fewer steps than another joins the step of that other.
        if self._num_steps_begun[optimizer] == max(self._num_steps_begun.values()):
            self.before_step()
        self._num_steps_begun[optimizer] += 1

    def _remove_at_end(self, handles: Iterable[RemovableHandle]) -> None:
        for handle in handles:
            self._cleanup.callback(handle.remove)


def steps_before(
    optimizer: torch.optim.Optimizer,
    counts: Mapping[torch.optim.Optimizer, int],
) -> int:
    """Return the number of steps that a new optimizer continues from.

    It replaces the optimizers that step on the same parameters, and takes part in the steps of all
    others.

    Args:
        optimizer: the new optimizer.
        counts: known optimizer -> number of steps it has begun.
    """
    stepped = {id(parameter) for parameter in stepped_by(optimizer)}
    replaced = [0]
    for other, count in counts.items():
        if not stepped.isdisjoint(id(parameter) for parameter in stepped_by(other)):
            replaced.append(count)
    return max(replaced)


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer steps on."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def guard_model(model: torch.nn.Module, guard: Guard) -> Iterator[RemovableHandle]:
    """Call `guard` whenever the model, or a module in it, is about to use its parameters.

    Yields the handles of the hooks, each of which is registered when the iterator reaches it.
    """
    # A deep copy of the model also copies the hooks, but its parameters are its own.
    guarded = weakref.WeakSet(model.modules())

    def needs_parameters(module: torch.nn.Module, *_: Any) -> None:
        if module in guarded:
            guard(["param"])

    # Before FSDP2's own hook, which gathers parameters.
    yield model.register_forward_pre_hook(needs_parameters, prepend=True)
    for module in model.modules():
        yield module.register_state_dict_pre_hook(needs_parameters)
        yield module.register_load_state_dict_pre_hook(needs_parameters)


def guard_optimizer(optimizer: torch.optim.Optimizer, guard: Guard) -> Iterator[RemovableHandle]:
    """Call `guard` before steps of the optimizer, and before its state is saved or loaded.

    Yields the handles of the hooks, each of which is registered when the iterator reaches it.
    """

    def needs_all(*_: Any) -> None:
        guard(KINDS)

    yield optimizer.register_step_pre_hook(needs_all)
    yield optimizer.register_state_dict_pre_hook(needs_all)
    yield optimizer.register_load_state_dict_pre_hook(needs_all)


def guard_method(owner: object, name: str, guard: Guard) -> Callable[[], None]:
    """Call `guard` for all state before a method of this object; return a function that ends it."""
    method = getattr(owner, name)

    @wraps(method)
    def guarded(*arguments: Any, **named: Any) -> Any:
        guard(KINDS)
        return method(*arguments, **named)

    def end() -> None:
        # Another engine may guard it too by now.
        if vars(owner).get(name) is guarded:
            delattr(owner, name)

    setattr(owner, name, guarded)
    return end


class WholeTensors(TrainingWeights):
    """Weights that are whole on every rank, as in a replicated model.

    They are the adaptor of such a model, which has no LoRA and no padding that is read.

    They move into one elastic buffer per dtype, whose memory comes and goes page by page and which
    peers on the host can read. Parameters stay the same objects, so that an optimizer may refer to
    them already.

    Args:
        tensors: name in a checkpoint -> tensor on the device. A tensor with two names, such as a
            tied head, counts once, by its first name.
        rank: this process in the job.
        models: modules with these tensors and no others. A change of their structure makes a
            comparison of log-probabilities due again; without them only moved data is noticed.
    """

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        models: Modules = (),
    ) -> None:
        self.rank = rank
        first_names: dict[int, str] = {}
        self.tensors: TensorDict = {}
        for name, tensor in tensors.items():
            if first_names.setdefault(id(tensor), name) == name:
                self.tensors[name] = tensor
        self._flat: TensorDict = {}
        self._places: dict[str, Place] = {}
        parts = parts_in_elastic_buffers([tensor.data for tensor in self.tensors.values()])
        for (name, tensor), part in zip(self.tensors.items(), parts, strict=True):
            buffer = BufferId(rank, f"weights in {dtype_name(part)}")
            self._flat.setdefault(buffer.name, flat_storage_of(part))
            self._places[name] = Place(buffer, int(part.storage_offset()), tuple(part.stride()))
            tensor.data = part
        # The fingerprint is of modules, so tensors without one get a module as its buffers.
        holder = torch.nn.Module()
        vars(holder)["_buffers"].update(self.tensors)
        self.fingerprint = Fingerprint(models or [holder])

    def layout(self) -> Layout:
        """Return the location of every tensor on this rank."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        shards = [
            Shard(Region(name, (0,) * len(shape), shape), self._places[name])
            for name, shape in shapes.items()
        ]
        return layout_in(self._flat, self.rank, shapes, shards)

    def buffers(self) -> FlatBuffers:
        """Return the flat buffers by name."""
        return self._flat

    def offload_items(self) -> Iterator[OffloadItem]:
        """Yield an item for each buffer."""
        for name, flat in self._flat.items():
            yield OffloadItem(name, "param", flat)

    def finish_pending(self) -> None:
        """Check that tensors are still in the buffers.

        Raises:
            ReshardError: a tensor moved, so that a switch would read stale memory.
        """
        self.fingerprint.require_placed()

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError if a weight has a NaN or an infinite value.

        `unread`: intervals by buffer, in elements, that need no check because no peer reads them.
        """
        require_usable_values(read_parts(self._flat, unread or {}), self.tensors.items)


def parts_in_elastic_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one device into elastic memory; see `elastic_parts`.

    Returns:
        The copies, in the order of `tensors`.
    """
    parts = elastic_parts(tensors, tensors[0].device) if tensors else []
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


def elastic_parts(shapes: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Allocate tensors in elastic memory, in one buffer per dtype.

    Every buffer takes whole pages and a file descriptor, so there is only one per dtype.

    Args:
        shapes: tensors with the shapes and dtypes; their values and devices do not matter.
        device: device of the memory.

    Returns:
        Contiguous tensors of undefined values, in this order. Each start is a multiple of 16 bytes.
    """
    parts = list(shapes)
    for dtype in dict.fromkeys(tensor.dtype for tensor in shapes):
        indices = [index for index, tensor in enumerate(shapes) if tensor.dtype is dtype]
        step = _ALIGNMENT // dtype.itemsize
        sizes = [round_up(shapes[index].numel(), step) for index in indices]
        # Sizes 16, 8 and 24 give starts 0, 16 and 24, and 48 elements.
        *starts, end = accumulate(sizes, initial=0)
        flat = allocate_elastic(end, dtype, device, "param")
        for index, start in zip(indices, starts, strict=True):
            shape = shapes[index].shape
            parts[index] = flat[start : start + shape.numel()].view(shape)
    return parts


def flat_storage_of(local: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a local tensor, as a 1-D tensor of its dtype."""
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())


def runs_by_buffer(shards: Sequence[Shard]) -> dict[str, list[Extent]]:
    """Return, by buffer, the interval of each shard from its first element to its last.

    The shard covers all elements of the interval, because parameters are dense and split along
    their rows.
    """
    runs: dict[str, list[Extent]] = {}
    for shard in shards:
        extent = shard.place.extent(shard.region.lengths)
        runs.setdefault(shard.place.buffer.name, []).append(extent)
    return runs


def gaps(numel: int, runs: Sequence[Extent]) -> tuple[Extent, ...]:
    """Return the intervals of a buffer that no run covers.

    They are ends of buckets, padding of the vocabulary, and alignment of parameters.

    Args:
        numel: elements of the buffer.
        runs: intervals in it, in any order; may overlap.
    """
    uncovered = []
    end = 0
    # The empty interval at the end of the buffer closes the last gap.
    for run in (*sorted(runs), Extent(numel, numel)):
        if run.start > end:
            uncovered.append(Extent(end, run.start))
        end = max(end, run.stop)
    return tuple(uncovered)


def layout_in(
    buffers: FlatBuffers,
    rank: int,
    shapes: Shapes,
    shards: Sequence[Shard],
) -> Layout:
    """Return the layout of shards in flat buffers; elements that no shard covers are padding.

    Args:
        buffers: name -> flat buffer.
        rank: this process in the job.
        shapes: canonical tensor -> its whole shape.
        shards: parts of these tensors in the buffers.
    """
    runs = runs_by_buffer(shards)
    records = {}
    for name, flat in buffers.items():
        padding = gaps(flat.numel(), runs.get(name, ()))
        is_exported = exported_buffer_of(flat) is not None
        records[BufferId(rank, name)] = Buffer(
            flat.numel(),
            dtype_name(flat),
            padding=padding,
            exported=is_exported,
        )
    return Layout(shapes, records, tuple(shards))


def is_frozen(tensor: torch.Tensor) -> bool:
    """Return True for a parameter that requires no gradient."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, as in records: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def read_parts(
    buffers: FlatBuffers,
    unread: Mapping[str, Sequence[Extent]],
) -> Iterator[torch.Tensor]:
    """Yield the parts of buffers outside the intervals `unread`."""
    for name, flat in buffers.items():
        for part in gaps(flat.numel(), unread.get(name, ())):
            yield flat[part.start : part.stop]


def require_usable_values(
    buffers: Iterable[torch.Tensor],
    parameters: Callable[[], Iterable[NamedTensor]],
) -> None:
    """Raise WeightError listing every parameter that holds a NaN or an infinity.

    Reads each buffer once.

    Args:
        buffers: memory of the parameters.
        parameters: function that yields (name in messages, elements on this rank). It is called
            only if a buffer has an unusable value, which may also be in padding.
    """
    if all(_is_finite(tensor) for tensor in buffers):
        return
    findings = []
    for name, tensor in parameters():
        values = tensor.detach()
        counts = {"NaN": int(values.isnan().sum()), "Inf": int(values.isinf().sum())}
        if any(counts.values()):
            problem = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            findings.append(f"{name}: {problem} of {values.numel()} elements")
    if findings:
        raise WeightError(findings)


def require_finite_to_save(tensors: Callable[[], Iterable[NamedTensor]]) -> None:
    """Raise WeightError listing every tensor that is not finite, before it is saved.

    `tensors`: function that yields (name in messages, elements on this rank).
    """
    try:
        require_usable_values((tensor for _, tensor in tensors()), tensors)
    except WeightError as error:
        remedy = "return to an earlier checkpoint, or save them with check_nan=False"
        raise WeightError([*error.findings, remedy]) from None


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.float8_e4m3fn:
        # It has no infinity, NaN in either sign, and few operators.
        parts = tensor.view(torch.uint8).split(2**26)
        return not any(bool((part & 0x7F == 0x7F).any()) for part in parts)
    # The sum is the fastest check, but it may overflow although all elements are finite.
    if not tensor.numel() or tensor.sum().isfinite():
        return True
    # A NaN is both the minimum and the maximum.
    return all(bool(value.isfinite()) for value in tensor.aminmax())
