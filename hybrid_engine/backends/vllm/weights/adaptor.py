"""The inference side of a reshard: vLLM's parameters as flat buffers, filled and committed group by group.

while serving:
    release()             weights given up; the training side has the memory
    for each bucket:
        allocate(groups)  flat buffers in loader layout, padding zeroed
        ... transports write them ...
        commit(groups)    bound as at load, vLLM's post-load processing run, loader-layout storage dropped
    finish_fill()         staging memory freed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from hybrid_engine.backends.vllm.process_state import ProcessSettings, process_settings_kept
from hybrid_engine.backends.vllm.weights.groups import HOLDING, STAGED, Event, GroupState, GroupStates
from hybrid_engine.backends.vllm.weights.processed_model import Observer, ProcessedModel
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel
from hybrid_engine.backends.vllm.weights.tracing import flat_view
from hybrid_engine.backends.vllm.weights.weight_memory import WeightMemory
from hybrid_engine.errors import ModelError, StateError, first_of
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.records.layout import Layout


class VllmAdaptor:
    """One rank's vLLM model as `InferenceWeights` (hybrid_engine/ports.py).

    Memory: between `allocate` and `commit` a group exists in loader layout; after `commit` only in the form vLLM
    computes with, which on a GPU stays where it is while a group passes through loader layout beside it. On a CPU an
    embedding and a head stay in both forms, as in vLLM itself, and what is packed passes through the same pages, group
    after group, which go with `finish_fill`.

    Attributes:
        rank: global rank.
        device: of the weights.
        nbytes: bytes of this rank's weights in loader layout.
        staged: canonical tensors that go through the model's own loader at every reshard.
    """

    def __init__(
        self,
        model: ProcessedModel,
        memory: WeightMemory,
        keeps_memory: bool = False,
        settings: ProcessSettings | None = None,
    ) -> None:
        """
        Args:
            keeps_memory: `release` only declares the weights void; their memory stays, that for staging too, but the KV
                cache's goes.
            settings: in force while vLLM processes weights; None: those of the caller.
        """
        traced = model.traced
        self.rank, self.staged, self._layout = traced.rank, traced.staged, traced.layout
        self.device = next(iter(traced.storages.values())).device
        self.nbytes = sum(storage.nbytes for storage in traced.storages.values())
        self._model: ProcessedModel | None = model  # until `close`
        self._memory, self._keeps_memory, self._settings = memory, keeps_memory, settings
        self._states = GroupStates(traced.groups)
        self._filling: dict[str, dict[str, torch.Tensor]] = {}  # by group and buffer, between allocate and commit
        self._may_have_computed = True  # since `forward_state.forget`: vLLM profiles the model before the first fill
        self._unforgotten: Sequence[str] = ()  # why layers could not forget what they computed last
        self._observers: list[Observer] = []
        self._verified: Collection[str] = ()  # canonical tensors
        self._tell_mismatch: Callable[[str], None]  # while there are any
        self._live_digests: dict[str, tuple[int, ...]] = {}  # of groups whose commit was verified, as they were then

    # -- the port -----------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        return self._layout

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        """Have the records of this rank, and keep memory or not: each job that a server's worker joins says so anew."""
        self.rank, self._layout, self._keeps_memory = rank, self._traced.layout.on(rank), keeps_memory

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Flat buffers of these groups by name: the live memory where vLLM computes with that, new memory elsewhere.

        The weights that the groups held before are gone. Raises StateError for a group that this rank does not have,
        and ModelError where layers hold what they made of earlier weights and cannot make anew.
        """
        self._processed.barrier.begin()
        self._forget_forwards()
        if self._unforgotten:
            lines = "\n".join(f"  - {fault}" for fault in self._unforgotten)
            raise ModelError(f"vLLM computes with state that cannot be renewed ({len(self._unforgotten)}):\n{lines}")
        self._states.advance(Event.ALLOCATE, groups)
        with self._failing(groups):
            self._drop(groups)
            tensors = self._loader_tensors(groups)
            for name in groups:
                self._filling[name] = {buffer: tensors[buffer] for buffer in self._traced.groups[name].buffers}
        return {name: flat_view(tensor) for name, tensor in tensors.items()}

    def commit(self, groups: Sequence[str]) -> None:
        """Make filled groups the live weights. Raises StateError for a group that was not allocated.

        The process's settings stay as they are. Where vLLM's processing is collective, so is this.
        """
        self._states.require(Event.COMMIT, groups)
        is_processed = not self._processed.derivations.keys().isdisjoint(groups)
        # vLLM's code may set anything
        kept = process_settings_kept(self._settings) if is_processed else contextlib.nullcontext()
        with torch.no_grad(), kept, self._processed.context():
            for name in groups:
                with self._failing([name]):
                    self._processed.commit(name, self._filling[name], self._observe)
                    if verified := self._verified_tensors(name):
                        self._require_bound(name, verified)
                        self._live_digests[name] = self._live_digest(name)
                del self._filling[name]
                self._states.advance(Event.COMMIT, [name])

    def finish_fill(self) -> None:
        """Free staging memory, unless memory is to be kept; what belongs to no group has memory and values then.

        Where vLLM's processing is collective, so is this.
        """
        self._processed.barrier.finish()
        self._may_have_computed = True
        self._memory.complete()
        if self._memory.frees_all_at_once:
            with torch.no_grad():
                self._processed.restore_constants(self._processed.lasting_constants())
        if not self._keeps_memory:
            self._memory.trim()

    def abandon(self) -> None:
        """As the port says: ranks that process weights together with this one raise."""
        self._processed.barrier.abandon()

    def release(self, keep: Collection[str] = ()) -> None:
        """Free all weights; views of live ones stay valid and become usable with the next allocate. Idempotent.

        Committed groups in `keep` stay, unless memory can only be given back as a whole (vLLM's sleep mode).
        """
        self._processed.barrier.reset()
        self._forget_forwards()
        stay = set(keep).intersection(self.committed())
        if self._keeps_memory:
            self.void([name for name in self._traced.groups if name not in stay])
            self._memory.free_kv_cache()
            return
        live = self._processed.live
        # Not by the states: a failed allocate leaves released groups with live memory, or vLLM half awake.
        if not self.resident_nbytes() and self._memory.is_given_back(live):
            return
        gone = [name for name in self._traced.groups if name not in stay or self._memory.frees_all_at_once]
        self._states.advance(Event.RELEASE, gone)
        self._drop(gone)
        storages = (storage for name in gone for storage in self._traced.groups[name].storages)
        self._memory.free({name: live[name] for name in storages if name in live})
        self._memory.trim()

    def committed(self) -> Collection[str]:
        return self._states.among(GroupState.COMMITTED)

    @contextlib.contextmanager
    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> Iterator[None]:
        """See the port: live parameters are the tensors that were filled, and all weights are at the end what they
        were when they were committed. What kernels make of weights that they repack is proved by tests alone."""
        self._verified, self._tell_mismatch = tensors, unproven
        try:
            yield
            for name in sorted(self._live_digests.keys() & self.committed()):
                verified = self._verified_tensors(name)
                if verified and self._live_digest(name) != self._live_digests[name]:
                    unproven(f"{verified}: on rank {self.rank}, vLLM's weights changed after they were committed")
        finally:
            self._verified = ()

    def _verified_tensors(self, group: str) -> str:
        """The canonical tensors of a group, for a message, if any of them is verified."""
        buffers = self._traced.groups[group].buffers if self._verified else ()
        names = sorted({name for buffer in buffers for name in self._traced.sources.get(buffer, ())})
        return first_of(names, 4) if any(name in self._verified for name in names) else ""

    def _require_bound(self, group: str, verified: str) -> None:
        """See whether modules still hold the live tensors of a group, which were filled in place."""
        for storage in self._traced.storages_of(group):
            if (live := self._processed.live.get(storage.name)) is None:
                continue
            for binding in storage.bindings:
                found = binding.find(self._processed.modules)
                if found is None or (found.data_ptr(), found.shape) != (live.data_ptr(), live.shape):
                    what = f"vLLM's {binding.name} is not the tensor that was filled"
                    self._tell_mismatch(f"{verified}: on rank {self.rank}, {what}")

    def _live_digest(self, group: str) -> tuple[int, ...]:
        """Digests of the parameters and buffers that the modules of a group compute with now."""
        bindings = (binding for storage in self._traced.storages_of(group) for binding in storage.bindings)
        modules = [self._processed.modules[name] for name in dict.fromkeys(binding.module for binding in bindings)]
        tensors = (
            each for module in modules for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        )
        return tuple(box_digests(tensor.detach() for tensor in tensors))

    def resident_nbytes(self) -> int:
        """Bytes of weights in memory now; a packed copy counts as many bytes as its loader layout."""
        live, holding = self._processed.live, self._states.among(*HOLDING)
        if self._processed.keeps_addresses:
            holding = []  # what they hold is resident
        packed = [name for group in holding for name in self._traced.groups[group].storages]
        filling = [pair for group in self._filling.values() for pair in group.items()]
        return (
            self._memory.nbytes(self._processed.resident)
            + sum(self._traced.storages[name].nbytes for name in packed if name not in live)
            + sum(tensor.nbytes for name, tensor in filling if name not in live)
        )

    # -- beyond the port ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's. Raises StateError after `close`, as does whatever needs it."""
        return self._traced.model

    def close(self) -> None:
        """Refer to vLLM's model and its tensors no longer, whoever still refers to this adaptor. Idempotent.

        vLLM frees the model at its shutdown, before its memory pools end, only if nothing else refers to it.
        """
        self._model = None
        self._filling.clear()
        self._observers.clear()

    def require_ready(self) -> None:
        """Raise StateError when the model cannot compute now."""
        self._states.require_committed()

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Within this context `observer` is shown every parameter that is committed."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    @property
    def written_buffers(self) -> tuple[str, ...]:
        """Names of the buffers, as against parameters, that the model's loader writes."""
        bindings = (storage.bindings[0] for storage in self._traced.storages.values())
        return tuple(binding.name for binding in bindings if not binding.is_parameter)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _processed(self) -> ProcessedModel:
        if self._model is None:
            raise StateError("the inference engine was shut down: build a new one")
        return self._model

    @property
    def _traced(self) -> TracedModel:
        return self._processed.traced

    def void(self, groups: Collection[str]) -> None:
        """Declare the weights of groups void, in place: no memory is freed, but for tensors that were being filled."""
        self._states.advance(Event.VOID, groups)
        for name in groups:
            self._filling.pop(name, None)
            self._live_digests.pop(name, None)

    def _forget_forwards(self) -> None:
        """Have layers forget what they made of the present weights, once after they may have computed.

        Reads tensors that have no memory any more once `release` is over: vLLM's sleep mode unmaps them.
        """
        if self._may_have_computed:
            self._unforgotten = self._processed.forward_state.forget()
            self._may_have_computed = False

    @contextlib.contextmanager
    def _failing(self, groups: Sequence[str]) -> Iterator[None]:
        """Should this block fail, the groups hold nothing, and can be allocated again."""
        try:
            yield
        except BaseException:
            self.abandon()
            self._states.advance(Event.FAIL, groups)
            self._drop(groups)
            raise

    def _drop(self, groups: Iterable[str]) -> None:
        for name in groups:
            self._filling.pop(name, None)
            self._live_digests.pop(name, None)
            self._processed.drop(name)

    def _loader_tensors(self, groups: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors to fill, by buffer; zero where nothing will be written, so padding is in place."""
        live = self._processed.live
        storages = [storage for group in groups for storage in self._traced.storages_of(group)]
        passing = [storage for storage in storages if storage.name not in live]
        self._memory.restore(self._processed.resident, storages, self._processed.derived_with(groups))
        flats = self._memory.new(passing, self._processed.in_place)
        tensors = {storage.name: live[storage.name] for storage in storages if storage.name in live}
        tensors |= {storage.name: storage.create(flat) for storage, flat in zip(passing, flats, strict=True)}
        for name, tensor in tensors.items():
            # At every allocate, live tensors too: pages come from another group, memory that was given back holds
            # anything, and packing may have touched the padding of a tensor that stays. No transfer writes it, and it
            # is little: rows beyond the vocabulary, and all of a tensor only where the model's own loader writes.
            for extent in self._traced.unwritten[name]:
                flat_view(tensor)[extent.start : extent.stop].zero_()
        for name in (tensor for group in groups for tensor in self._traced.groups[group].staged):
            shape, dtype = self._traced.layout.tensors[name], self._traced.dtypes[name]
            tensors[STAGED + name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return tensors

    def _observe(self, name: str, tensor: torch.Tensor) -> None:
        for observer in self._observers:
            observer(name, tensor)
