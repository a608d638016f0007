"""The inference side of a reshard: vLLM's parameters as flat buffers, filled group by group and put in force.

    capture(model)            once, between construction and vLLM's post-load processing: trace the loader
    while serving:
        release()             weights given up; the training side has the memory
        for each bucket:
            allocate(groups)  flat buffers in loader layout, padding zeroed
            ... transports write them ...
            commit(groups)    bound as at load, vLLM's post-load processing run, loader-layout storage dropped
        finish_fill()         staging memory is freed

A group is the set of modules that must be committed at once: one module, or several that share a storage (a tied
head), derive from each other (MLA) or are written by one staged tensor.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.quantization import materialize
from hybrid_engine.backends.vllm.weights.storages import Binding, WeightStorage, flat_view, take_inventory
from hybrid_engine.backends.vllm.weights.traced_layout import STAGED, build_layout
from hybrid_engine.backends.vllm.weights.tracing import storage_key, trace_loader
from hybrid_engine.errors import StateError
from hybrid_engine.memory import heap
from hybrid_engine.memory.staging_pool import StagingPool
from hybrid_engine.records.layout import Extent, Layout

logger = logging.getLogger(__name__)

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its loader-layout tensor, filled, before vLLM processes it."""


class DeviceMemory(Protocol):
    """The device memory of live weights (vLLM's sleep mode)."""

    def free(self) -> None:
        """Give the memory back; contents are lost, addresses stay."""

    def restore(self) -> None:
        """Take the memory again; contents are undefined."""


@dataclass
class _Group:
    """What is committed at once; names in the model's order."""

    modules: list[str] = field(default_factory=list)
    repacked: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    storages: list[str] = field(default_factory=list)
    staged: list[str] = field(default_factory=list)


class VllmAdaptor:
    """One rank's vLLM model as `InferenceWeights` (hybrid_engine/ports.py).

    Memory: between `allocate` and `commit` a group exists in loader layout; after `commit` only in the form vLLM
    computes with. On a CPU an embedding and a head stay in both forms, as in vLLM itself, and what is packed passes
    through the same pages, group after group, which go with `finish_fill`.

    Attributes:
        observer: see `Observer`; tests compare with a native load through it.
        context: entered around every commit (vLLM's current configuration).
        memory: gives live weights' device memory back and takes it again, under the same addresses.
        keeps_memory: `release` only declares the weights void; their memory stays, also that of the way to it.
        nbytes: bytes of this rank's weights in loader layout.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        rank: int,
        act_dtype: torch.dtype | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Trace the loader of a freshly constructed model; its parameters are set to zero.

        Args:
            model: a vLLM model whose weights have not been processed.
            tensors: canonical names and shapes: those of a checkpoint on disk.
            dtype: of the canonical tensors, the training side's weight dtype.
            rank: global rank.
            act_dtype: of the model's activations, for attention's post-load processing; `dtype` by default.
            dtypes: canonical name -> dtype ("float32"), where it is not `dtype`.

        Raises ModelError or ParameterMismatchError; the model cannot be used then.
        """
        self.model = model
        self.rank = rank
        self.observer: Observer | None = None
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.memory: DeviceMemory | None = None
        self.keeps_memory = False
        self._dtype = dtype
        self._act_dtype = act_dtype or dtype
        materialize(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        self._dtypes = {name: getattr(torch, other) for name, other in (dtypes or {}).items()}
        self._trace = trace_loader(model.load_weights, tensors, dtype, self._dtypes)
        self._report_staged()
        written = {write.storage for write in (*self._trace.copies, *self._trace.staged_writes)}
        storages = take_inventory(model, written)
        self._modules = dict(model.named_modules())
        self._groups, group_of = self._make_groups(storages)
        self._layout = build_layout(
            rank,
            tensors,
            lambda name: str(self._dtype_of(name)).removeprefix("torch."),
            storages,
            self._trace,
            postload.vocabulary_padding(model),
            group_of,
        )
        repacked = set(self._repacked_modules())
        repacked_storages = {
            storage.name for storage in storages if any(binding.module in repacked for binding in storage.bindings)
        }
        # A repacked module's first parameters are vLLM's to drop: holding them would keep their memory.
        self._first = {
            storage.name: weakref.ref(storage.tensor) for storage in storages if storage.name in repacked_storages
        }
        self._storages = {
            storage.name: replace(storage, tensor=None) if storage.name in repacked_storages else storage
            for storage in storages
        }
        self.nbytes = sum(storage.nbytes for storage in storages)
        self._unwritten = self._find_unwritten()
        self._staging = StagingPool()  # where packed weights are in loader layout, on a CPU
        self._plain_attributes = {name: _attributes(self._modules[name]) for name in self._repacked_modules()}
        self._derived: dict[str, set[str]] = {}
        self._filling: dict[str, torch.Tensor] = {}  # loader-layout tensors between allocate and commit, by storage
        self._uncommitted = set(self._groups)
        self._packed: set[str] = set()  # groups whose packed weights are there
        self._released = False  # from release until the next allocate
        self._stale: set[str] = set()  # live storages whose memory is new since the release
        self._left_in_place: set[str] = set()  # storages of repacked modules that are live all the same

    # -- the port ---------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """The records of this rank."""
        return self._layout

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Flat buffers of these groups by name: new memory for repacked weights, the live one otherwise.

        The weights that the groups held before are gone.
        """
        self._check_known(groups)
        was_released, self._released = self._released, False  # so that a release cleans up after a failure here
        if was_released and self.memory is not None:
            self.memory.restore()
        for name in groups:
            self._uncommitted.add(name)
            self._packed.discard(name)
            self._drop_packed(self._groups[name])
        storages = [self._storages[storage] for name in groups for storage in self._groups[name].storages]
        self._filling |= self._loader_tensors(storages)
        buffers = {storage.name: flat_view(self._filling[storage.name]) for storage in storages}
        for tensor_name in (tensor for name in groups for tensor in self._groups[name].staged):
            shape = self._layout.tensors[tensor_name]
            tensor = torch.zeros(shape, dtype=self._dtype_of(tensor_name), device=self._device)
            self._filling[STAGED + tensor_name] = tensor
            buffers[STAGED + tensor_name] = tensor.view(-1)
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """Put filled groups in force. Raises StateError for a group that was not allocated."""
        self._check_known(groups)
        if missing := [name for name in groups if not self._is_allocated(self._groups[name])]:
            raise StateError(f"committed before they were allocated: {', '.join(missing)}")
        with torch.no_grad(), self.context():
            for name in groups:
                self._commit_group(self._groups[name])
                self._uncommitted.discard(name)
                self._packed.add(name)

    def finish_fill(self) -> None:
        """Give back the pages through which weights passed, unless memory is to be kept."""
        if self._device.type == "cpu" and not self.keeps_memory:
            self._staging.trim()
            heap.trim()

    def release(self) -> None:
        """Free all weights; views of live ones stay valid and become usable with the next allocate."""
        if self._released:
            return
        self._filling.clear()
        self._uncommitted = set(self._groups)
        if self.keeps_memory:
            return
        self._released = True
        self._stale = {storage.name for storage in self._live_storages()}
        self._packed.clear()
        for group in self._groups.values():
            self._drop_packed(group)
        if self.memory is not None:
            self.memory.free()
        elif self._device.type == "cpu":
            for storage in self._live_storages():
                storage.tensor.untyped_storage().resize_(0)
            self._staging.trim()
            heap.trim()
        else:
            logger.warning("vLLM's sleep mode is off: its %d bytes of weights stay on the device", self.nbytes)

    # -- beyond the port ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every group holds committed weights."""
        return not self._uncommitted

    def require_ready(self) -> None:
        """Raise StateError when the model cannot compute now."""
        if self._released:
            raise StateError("the inference weights are released: reshard (allocate, fill, commit) before generating")
        if self._uncommitted:
            count, first = f"{len(self._uncommitted)} of {len(self._groups)}", ", ".join(sorted(self._uncommitted)[:3])
            raise StateError(
                f"{count} module groups hold no committed weights ({first}, …): finish the reshard before generating"
            )

    @property
    def staged(self) -> tuple[str, ...]:
        """Canonical tensors that go through the model's own loader at every reshard."""
        return self._trace.staged

    @property
    def written_buffers(self) -> tuple[str, ...]:
        """Names of the buffers, as against parameters, that the model's loader writes."""
        bindings = (storage.bindings[0] for storage in self._storages.values())
        return tuple(binding.name for binding in bindings if not binding.is_parameter)

    def resident_nbytes(self) -> int:
        """Bytes of weights in memory now; a packed copy counts as many bytes as its loader layout."""
        freed = self._released and self.memory is not None
        live = 0 if freed else sum(storage.tensor.untyped_storage().nbytes() for storage in self._live_storages())
        packed = sum(self._storages[name].nbytes for group in self._packed for name in self._passing(group))
        passing = [tensor for name, tensor in self._filling.items() if not self._is_live(name)]
        return live + packed + sum(tensor.nbytes for tensor in passing) + self._staging.free_nbytes

    def note_processed(self) -> None:
        """Called once vLLM's first post-load processing is over, to see what it changed.

        What it added to a module is derived from weights. A repacked module's parameter that it left in place (a
        router's bias, a head) is filled in place from now on: others may refer to it.
        """
        for name, before in self._plain_attributes.items():
            self._derived[name] = _attributes(self._modules[name]) - before
        for name, first in self._first.items():
            storage, tensor = self._storages[name], first()
            if tensor is not None and storage_key(tensor) == storage.key and self._is_bound(storage, tensor):
                self._storages[name] = replace(storage, tensor=tensor)
                self._left_in_place.add(name)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _make_groups(self, storages: Sequence[WeightStorage]) -> tuple[dict[str, _Group], dict[str, str]]:
        """Join modules that must be committed together; returns the groups and which group each buffer is in."""
        joined = _DisjointSets(self._modules)
        for storage in storages:
            joined.join(binding.module for binding in storage.bindings)
        attention = list(postload.deriving_attention(self.model))
        for name, _, inner in attention:
            joined.join((name, *inner))
        owner = {storage.key: storage.bindings[0].module for storage in storages}
        staged_in: dict[str, str] = {}
        for write in self._trace.staged_writes:
            if write.storage in owner:
                touched = [owner[write.storage], *(staged_in[name] for name in write.tensors if name in staged_in)]
                joined.join(touched)
                staged_in.update(dict.fromkeys(write.tensors, owner[write.storage]))
        groups: dict[str, _Group] = {}
        group_of: dict[str, str] = {}
        for storage in storages:
            group_of[storage.name] = joined.first(storage.bindings[0].module)
            groups.setdefault(group_of[storage.name], _Group()).storages.append(storage.name)
        for name in self._trace.staged:
            group_of[STAGED + name] = joined.first(staged_in[name])
            groups[group_of[STAGED + name]].staged.append(name)
        self._assign_modules(groups, joined, attention)
        return groups, group_of

    def _assign_modules(self, groups: dict[str, _Group], joined: _DisjointSets, attention: list[Any]) -> None:
        for name, module in self._modules.items():
            group = groups.get(joined.first(name))
            if group is not None:
                group.modules.append(name)
                if postload.is_repacked(name, module, self._device):
                    group.repacked.append(name)
        for name, _, _ in attention:
            if self._device.type != "cpu":
                postload.refuse_attention(name, self._modules[name], self._device)
            groups[joined.first(name)].attention.append(name)

    def _repacked_modules(self) -> list[str]:
        return [name for group in self._groups.values() for name in group.repacked]

    def _live_storages(self) -> list[WeightStorage]:
        return [storage for storage in self._storages.values() if storage.tensor is not None]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _dtype_of(self, tensor: str) -> torch.dtype:
        return self._dtypes.get(tensor, self._dtype)

    def _check_known(self, groups: Iterable[str]) -> None:
        if unknown := [name for name in groups if name not in self._groups]:
            raise StateError(f"no such groups in this rank's layout: {', '.join(unknown)}")

    def _is_allocated(self, group: _Group) -> bool:
        return all(name in self._filling for name in group.storages)

    # -- one group ----------------------------------------------------------------------------------------------------

    def _loader_tensors(self, storages: Sequence[WeightStorage]) -> dict[str, torch.Tensor]:
        """The tensors to fill, by storage; zero where nothing will be written, so padding is in place."""
        passing = [storage for storage in storages if storage.tensor is None]
        tensors = {
            storage.name: storage.create(memory)
            for storage, memory in zip(passing, self._new_memory(passing), strict=True)
        }
        fresh = list(passing)
        for storage in storages:
            if storage.tensor is not None:
                tensors[storage.name] = storage.tensor
                if self._restore_live(storage) or storage.name in self._left_in_place:
                    fresh.append(storage)  # where packing may have touched the padding
        for storage in fresh:
            flat = flat_view(tensors[storage.name])
            for extent in self._unwritten[storage.name]:
                flat[extent.start : extent.stop].zero_()
        return tensors

    def _restore_live(self, storage: WeightStorage) -> bool:
        """Take memory again for a live storage that was released; whether it was."""
        if storage.name not in self._stale:
            return False
        self._stale.remove(storage.name)
        memory = storage.tensor.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(storage.nbytes)
            heap.prefer_huge_pages(memory)
        return True

    def _new_memory(self, storages: Sequence[WeightStorage]) -> list[torch.Tensor]:
        if self._device.type == "cpu":
            return self._staging.lend([(storage.numel, storage.dtype) for storage in storages])
        return [torch.empty(storage.numel, dtype=storage.dtype, device=storage.device) for storage in storages]

    def _find_unwritten(self) -> dict[str, tuple[Extent, ...]]:
        """Storage name -> intervals that no transfer writes: padding, or all of it where the model's loader writes."""
        num_written: Counter[str] = Counter()
        for shard in self._layout.shards:
            num_written[shard.place.buffer.name] += shard.region.numel
        unwritten = {}
        for buffer_id, buffer in self._layout.buffers.items():
            num_padding = sum(extent.stop - extent.start for extent in buffer.padding)
            is_whole = num_written[buffer_id.name] + num_padding == buffer.numel
            unwritten[buffer_id.name] = buffer.padding if is_whole else (Extent(0, buffer.numel),)
        return unwritten

    def _is_live(self, storage_name: str) -> bool:
        return storage_name in self._storages and self._storages[storage_name].tensor is not None

    def _passing(self, group: str) -> list[str]:
        """Storages of a group that exist in loader layout between `allocate` and `commit` only."""
        return [name for name in self._groups[group].storages if not self._is_live(name)]

    def _drop_packed(self, group: _Group) -> None:
        """Forget what vLLM derived from the weights of a group's repacked modules, and those weights."""
        for name in group.repacked:
            module = self._modules[name]
            for attribute in self._derived.get(name, ()):
                for table in (module.__dict__, module._parameters, module._buffers):
                    table.pop(attribute, None)
            postload.forget_kernel(postload.post_load_method(module))
        for name in group.storages:
            storage = self._storages[name]
            if storage.tensor is None:
                self._bind(storage.bindings, storage.placeholder())

    def _commit_group(self, group: _Group) -> None:
        for name in group.storages:
            self._bind(self._storages[name].bindings, self._filling[name])
        if group.staged:
            tensors = [(name, self._filling.pop(STAGED + name)) for name in group.staged]
            self.model.load_weights(iter(tensors))
            del tensors
        for name in group.storages:
            tensor = self._filling.pop(name)
            if self.observer is not None:
                self.observer(name, tensor)
            del tensor
        for name in group.repacked:
            postload.process(self._modules[name])
        for name in group.attention:
            self._modules[name].process_weights_after_loading(self._act_dtype)

    def _is_bound(self, storage: WeightStorage, tensor: torch.Tensor) -> bool:
        """Whether every binding of a storage still holds this very tensor."""
        modules = ((self._modules[binding.module], binding) for binding in storage.bindings)
        return all(getattr(module, binding.attribute, None) is tensor for module, binding in modules)

    def _bind(self, bindings: Sequence[Binding], tensor: torch.Tensor) -> None:
        for binding in bindings:
            module = self._modules[binding.module]
            table = module._parameters if binding.is_parameter else module._buffers
            table[binding.attribute] = tensor

    def _report_staged(self) -> None:
        if self._trace.staged:
            logger.warning(
                "%d canonical tensors cannot be traced and go through the model's own loader at every reshard: %s",
                len(self._trace.staged),
                ", ".join(self._trace.staged),
            )


def _attributes(module: torch.nn.Module) -> set[str]:
    """Names of plain attributes, parameters and buffers."""
    return {*module.__dict__, *module._parameters, *module._buffers}


class _DisjointSets:
    """Names in an order; `join` merges the sets of some, `first` is the earliest name of a set."""

    def __init__(self, names: Iterable[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self._parent = {name: name for name in self._order}

    def first(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = sorted({self.first(name) for name in names}, key=self._order.__getitem__)
        for root in roots[1:]:
            self._parent[root] = roots[0]
