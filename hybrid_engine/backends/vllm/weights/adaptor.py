"""The inference side of a reshard: vLLM's parameters as flat buffers, committed group by group.

while serving:
    release()             weights given up; the training side has the memory
    for each bucket:
        allocate(groups)  flat buffers in loader layout, padding zeroed
        ... transports write them ...
        commit(groups)    bound as at load, processed by vLLM, loader-layout storage dropped
    finish_fill()         staging memory freed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice

import torch

from hybrid_engine.backends.vllm.process_state import ProcessSettings, process_settings_kept
from hybrid_engine.backends.vllm.weights.groups import (
    HOLDING,
    STAGED,
    GroupEvent,
    GroupState,
    GroupStates,
    Names,
)
from hybrid_engine.backends.vllm.weights.postload import own_tensors
from hybrid_engine.backends.vllm.weights.processed_model import Observer, ProcessedModel
from hybrid_engine.backends.vllm.weights.traced_model import TracedModel
from hybrid_engine.backends.vllm.weights.tracing import flat_view
from hybrid_engine.backends.vllm.weights.weight_memory import WeightMemory
from hybrid_engine.errors import ModelError, StateError, first_of
from hybrid_engine.memory.pool import Memories
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.layout import Layout


class VllmAdaptor:
    """One rank's vLLM model as `InferenceWeights` (hybrid_engine/ports.py).

    Memory: a group is in loader layout between `allocate` and `commit`, and afterwards only in the
    form vLLM computes with. On a GPU that form stays in place while a group passes through loader
    layout. On a CPU an embedding and a head stay in both forms, as in vLLM itself; packed weights
    pass through the same pages, group after group, which `finish_fill` frees.

    Attributes:
        rank: global rank.
        device: device of the weights.
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
            model: vLLM's model after its post-load processing.
            memory: allocates and frees memory of the weights.
            keeps_memory: `release` only declares the weights void and frees the KV cache; memory of
                weights and of staging stays.
            settings: process settings in force while vLLM processes weights; None: the caller's.
        """
        traced = model.traced
        self.rank = traced.rank
        self.staged = traced.staged
        self.device = next(iter(traced.storages.values())).device
        self.nbytes = sum(storage.nbytes for storage in traced.storages.values())
        self._layout = traced.layout
        self._model: ProcessedModel | None = model  # None after `close`
        self._memory = memory
        self._keeps_memory = keeps_memory
        self._settings = settings
        self._states = GroupStates(traced.groups)
        # group -> buffer -> tensor, between allocate and commit
        self._filling: dict[str, TensorDict] = {}
        # True if a forward may have run since `forward_state.forget`. It is True at first, because
        # vLLM profiles the model before the first fill.
        self._may_have_computed = True
        self._unforgotten: Sequence[str] = ()  # reasons why layers could not reset their state
        self._observers: list[Observer] = []
        self._verified: Collection[str] = ()  # canonical tensors
        self._report_mismatch: Callable[[str], None]  # set while `_verified` is not empty
        # digests of groups whose commit was verified, taken at that commit
        self._live_digests: dict[str, list[int]] = {}

    # -- the port ----------------------------------------------------------------------------------

    def layout(self) -> Layout:
        return self._layout

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        """Adopt the records of `rank` and its memory policy; called for each job a server joins."""
        self.rank = rank
        self._layout = self._traced.layout.on(rank)
        self._keeps_memory = keeps_memory

    def allocate(self, groups: Sequence[str]) -> Tensors:
        """Return flat buffers of these groups by name, and invalidate the groups' weights.

        A buffer is live memory if vLLM computes with its loader layout, and new memory otherwise.

        Raises StateError for a group that this rank does not have, and ModelError if layers hold
        state made of earlier weights that they cannot make again.
        """
        self._processed.barrier.begin()
        # Before the states change: a fault here leaves the groups as they were.
        self._forget_forwards()
        if self._unforgotten:
            lines = "\n".join(f"  - {fault}" for fault in self._unforgotten)
            raise ModelError(
                "vLLM computes with state that cannot be renewed "
                f"({len(self._unforgotten)}):\n{lines}",
                code="state-not-renewable",
            )
        self._states.advance(GroupEvent.ALLOCATE, groups)
        with self._failing(groups):
            # Where derived tensors need not keep their addresses, the old form goes before the new
            # one comes, so that the two never take memory together.
            self._drop(groups)
            tensors = self._loader_tensors(groups)
            for name in groups:
                buffers = self._traced.groups[name].buffers
                self._filling[name] = {buffer: tensors[buffer] for buffer in buffers}
        return {name: flat_view(tensor) for name, tensor in tensors.items()}

    def commit(self, groups: Sequence[str]) -> None:
        """Make filled groups the live weights; process settings stay unchanged.

        Collective if vLLM's processing is. Raises StateError for a group that was not allocated.
        """
        # Checked for all groups before the first one changes, as one commit may name several.
        self._states.require(GroupEvent.COMMIT, groups)
        is_processed = not self._processed.derivations.keys().isdisjoint(groups)
        # The processing is vLLM's code and may change any setting of the process.
        settings_kept = process_settings_kept(self._settings) if is_processed else nullcontext()
        verified = self._verified_tensors(groups)
        with torch.no_grad(), settings_kept, self._processed.context():
            for name in groups:
                with self._failing([name]):
                    self._processed.commit(name, self._filling[name], self._observe)
                    if name in verified:
                        self._require_bound(name, verified[name])
                del self._filling[name]
                self._states.advance(GroupEvent.COMMIT, [name])
            self._live_digests |= self._digests_of(verified)

    def finish_fill(self) -> None:
        """Complete the model's memory after the last commit, and free staging memory.

        Tensors outside of all groups get memory here. Staging memory stays if the adaptor keeps
        memory. Collective if vLLM's processing is.
        """
        self._processed.barrier.finish()
        # Only commits have written since `forget`, so their writes do not show a forward.
        if not self._may_have_computed:
            self._processed.forward_state.disregard_commits()
        self._may_have_computed = True
        self._memory.complete()
        if not self._keeps_memory:
            self._memory.trim()

    def abandon(self) -> None:
        """Make the ranks that process weights together with this one raise; see the port."""
        self._processed.barrier.abandon()

    def release(self, keep: Collection[str] = ()) -> None:
        """Free all weights, except committed groups in `keep`. Idempotent.

        Views of live weights stay valid, and usable after the next allocate. If memory can only be
        freed as a whole (vLLM's sleep mode), groups in `keep` are freed as well.
        """
        self._processed.barrier.reset()
        self._forget_forwards()
        stay = set(keep).intersection(self.committed())
        if self._keeps_memory:
            self.void([name for name in self._traced.groups if name not in stay])
            self._memory.free_kv_cache()
            return
        live = self._processed.live
        # Decided by memory, not by states: a failed allocate leaves released groups with live
        # memory, or vLLM partly awake.
        if not self.resident_nbytes() and self._memory.is_given_back(live):
            return
        frees_all = self._memory.frees_all_at_once
        released = [name for name in self._traced.groups if name not in stay or frees_all]
        self._states.advance(GroupEvent.RELEASE, released)
        # Modules let go of derived tensors first: memory that something refers to cannot be freed.
        self._drop(released)
        storages = (name for group in released for name in self._traced.groups[group].storages)
        self._memory.free({name: live[name] for name in storages if name in live})
        self._memory.trim()

    def share_memory(self, memories: Memories, leave: Callable[[], object]) -> bool:
        return self._memory.share(self._processed.live, memories, leave)

    def give_back(self) -> None:
        self._memory.give_back()

    def committed(self) -> Collection[str]:
        return self._states.among(GroupState.COMMITTED)

    @contextmanager
    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> Iterator[None]:
        """Verify in this context that vLLM computes with the filled tensors; see the port.

        Live parameters must be the filled tensors at commit, and all weights must be unchanged from
        the commit of their bucket to the end of the context. The repacked form of weights is
        verified by tests alone.
        """
        self._verified = tensors
        self._report_mismatch = unproven
        try:
            yield
            verified = self._verified_tensors(sorted(self._live_digests.keys() & self.committed()))
            for name, digests in self._digests_of(verified).items():
                if digests != self._live_digests[name]:
                    unproven(
                        f"{verified[name]}: on rank {self.rank}, vLLM's weights changed "
                        "after they were committed"
                    )
        finally:
            self._verified = ()

    def _verified_tensors(self, groups: Iterable[str]) -> dict[str, str]:
        """Return, of groups with verified tensors, the canonical tensors for a message."""
        verified = {}
        for group in groups if self._verified else ():
            names = sorted(
                {
                    name
                    for buffer in self._traced.groups[group].buffers
                    for name in self._traced.sources.get(buffer, ())
                }
            )
            if any(name in self._verified for name in names):
                verified[group] = first_of(names, 4)
        return verified

    def _require_bound(self, group: str, verified: str) -> None:
        """Report modules that no longer hold the live tensors of a group, which were filled."""
        for storage in self._traced.storages_of(group):
            live = self._processed.live.get(storage.name)
            if live is None:
                continue
            filled = (live.data_ptr(), live.shape)
            for binding in storage.bindings:
                bound = binding.find(self._processed.modules)
                if bound is None or (bound.data_ptr(), bound.shape) != filled:
                    self._report_mismatch(
                        f"{verified}: on rank {self.rank}, vLLM's {binding.name} "
                        "is not the tensor that was filled"
                    )

    def _digests_of(self, groups: Iterable[str]) -> dict[str, list[int]]:
        """Return digests of what the modules of the groups compute with now."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for group in groups:
            names = dict.fromkeys(
                binding.module
                for storage in self._traced.storages_of(group)
                for binding in storage.bindings
            )
            tensors[group] = [
                tensor.detach()
                for name in names
                for tensor in own_tensors(self._processed.modules[name])
            ]
        # Of all groups in one call, because the host waits for each.
        digests = iter(box_digests(chain.from_iterable(tensors.values())))
        return {group: list(islice(digests, len(part))) for group, part in tensors.items()}

    def resident_nbytes(self) -> int:
        """Return the bytes of weights in memory; a packed copy counts as its loader layout does."""
        live = self._processed.live
        # Where addresses are kept, derived tensors are among `resident` already.
        holding = [] if self._processed.keeps_addresses else self._states.among(*HOLDING)
        packed = [name for group in holding for name in self._traced.groups[group].storages]
        filling = [pair for buffers in self._filling.values() for pair in buffers.items()]
        return (
            self._memory.nbytes(self._processed.resident)
            + sum(self._traced.storages[name].nbytes for name in packed if name not in live)
            + sum(tensor.nbytes for name, tensor in filling if name not in live)
        )

    # -- beyond the port ---------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's model. After `close`, this and everything that uses it raises StateError."""
        return self._traced.model

    def close(self) -> None:
        """Drop all references to vLLM's model and its tensors. Idempotent.

        vLLM frees the model at its shutdown, before its memory pools end, but only if no other
        reference is left. Callers may keep this adaptor longer than that.
        """
        self._model = None
        self._memory.close()
        self._filling.clear()
        self._observers.clear()

    def require_ready(self) -> None:
        """Raise StateError if the model cannot compute now."""
        self._states.require_committed()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` with every parameter that is committed in this context."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    @property
    def written_buffers(self) -> Names:
        """Names of the buffers, as opposed to parameters, that the model's loader writes."""
        bindings = (storage.bindings[0] for storage in self._traced.storages.values())
        return tuple(binding.name for binding in bindings if not binding.is_parameter)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _processed(self) -> ProcessedModel:
        if self._model is None:
            raise StateError(
                "the inference engine was shut down: build a new one", code="engine-is-closed"
            )
        return self._model

    @property
    def _traced(self) -> TracedModel:
        return self._processed.traced

    def void(self, groups: Collection[str]) -> None:
        """Declare the weights of groups void in place; frees only tensors being filled."""
        self._states.advance(GroupEvent.VOID, groups)
        for name in groups:
            self._filling.pop(name, None)
            self._live_digests.pop(name, None)

    def _forget_forwards(self) -> None:
        """Reset the state that layers made of the present weights, if a forward may have run.

        Call before memory is freed: this reads tensors that vLLM's sleep mode unmaps.
        """
        if self._may_have_computed:
            self._unforgotten = self._processed.forward_state.forget()
            self._may_have_computed = False

    @contextmanager
    def _failing(self, groups: Sequence[str]) -> Iterator[None]:
        """Move the groups to RELEASED if this block raises, so that they can be allocated again."""
        try:
            yield
        except BaseException:
            self.abandon()
            self._states.advance(GroupEvent.FAIL, groups)
            self._drop(groups)
            raise

    def _drop(self, groups: Iterable[str]) -> None:
        for name in groups:
            self._filling.pop(name, None)
            self._live_digests.pop(name, None)
            self._processed.drop(name)

    def _loader_tensors(self, groups: Sequence[str]) -> TensorDict:
        """Return the tensors to fill by buffer; elements that no transfer writes are zero."""
        live = self._processed.live
        storages = [storage for group in groups for storage in self._traced.storages_of(group)]
        passing = [storage for storage in storages if storage.name not in live]
        resident = self._processed.resident
        names = [storage.name for storage in storages]
        names += self._processed.derived_with(groups)
        self._memory.restore(resident[name] for name in names if name in resident)
        flats = self._memory.new(passing, self._processed.in_place)
        tensors = {storage.name: live[storage.name] for storage in storages if storage.name in live}
        for storage, flat in zip(passing, flats, strict=True):
            tensors[storage.name] = storage.create(flat)
        for name, tensor in tensors.items():
            # Zeroed at every allocate, in live tensors as well: pages come from another group,
            # returned memory has arbitrary contents, and packing may have written the padding of a
            # tensor that stays. It is little memory (rows beyond the vocabulary), unless the
            # model's own loader writes the tensor: then it is all of it.
            for extent in self._traced.unwritten[name]:
                flat_view(tensor)[extent.start : extent.stop].zero_()
        for group in groups:
            for name in self._traced.groups[group].staged:
                shape = self._traced.layout.tensors[name]
                dtype = self._traced.dtypes[name]
                tensors[STAGED + name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return tensors

    def _observe(self, name: str, tensor: torch.Tensor) -> None:
        for observer in self._observers:
            observer(name, tensor)
