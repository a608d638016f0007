"""A vLLM model as its loader sees it, and what vLLM's post-load processing then made of it.

trace_model(model, ...)      between the model's construction and its processing: layout, groups, storages
... vLLM processes the weights, which are marks or zero ...
looking.look(traced, ...)    what is live, what vLLM derived: a ProcessedModel, all that an adaptor needs
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.collective_processing import ProcessingGate
from hybrid_engine.backends.vllm.weights.derivation import Constant, Derivation
from hybrid_engine.backends.vllm.weights.groups import CommitGroup, find_groups
from hybrid_engine.backends.vllm.weights.loaded_state import LoadedState, capture
from hybrid_engine.backends.vllm.weights.quantization import materialize
from hybrid_engine.backends.vllm.weights.storages import WeightStorage, flat_view, take_inventory
from hybrid_engine.backends.vllm.weights.traced_layout import build_layout
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights, trace_loader
from hybrid_engine.records.layout import Extent, Layout

logger = logging.getLogger(__name__)

Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""What post-load processing runs in: vLLM's current configuration."""


@dataclass(frozen=True)
class TracedModel:
    """What is known before vLLM processes the weights.

    Attributes:
        model: with weights of zero.
        rank: global rank.
        layout: the records of this rank.
        dtypes: of all canonical tensors.
        groups: by name.
        storages: by name, in loader layout.
        staged: canonical tensors that go through the model's own loader at every reshard.
        loaded: what its modules held.
    """

    model: torch.nn.Module
    rank: int
    layout: Layout
    dtypes: Mapping[str, torch.dtype]
    groups: Mapping[str, CommitGroup]
    storages: Mapping[str, WeightStorage]
    staged: tuple[str, ...]
    loaded: LoadedState

    @cached_property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """Buffer -> canonical tensors that go into it."""
        found: dict[str, set[str]] = {}
        for shard in self.layout.shards:
            found.setdefault(shard.place.buffer.name, set()).add(shard.region.tensor)
        return {name: frozenset(tensors) for name, tensors in found.items()}


@dataclass(frozen=True)
class ProcessedModel:
    """What is known once vLLM has processed the weights.

    Attributes:
        traced: what was known before.
        modules: by name.
        live: storage -> its parameter, where vLLM computes with what its loader fills: new weights are written there,
            for others may refer to it.
        derivations: group -> what vLLM derived from its weights, where it did.
        in_place: storages in whose memory the processing leaves other values; vLLM goes on to compute with that memory.
        constants: module -> its tensors, by path, that are neither weights nor made anew of them, with what they hold
            before the processing: those that it writes in place, and, where addresses must stay, all others but
            buffers, for vLLM's sleep mode loses their values.
        keeps_addresses: whether that stays where it is when it is made anew.
        context: see `Context`.
        act_dtype: of the model's activations.
        gate: which ranks pass together before each run of the processing, where that is collective.
    """

    traced: TracedModel
    modules: Mapping[str, torch.nn.Module]
    live: Mapping[str, torch.Tensor]
    derivations: Mapping[str, Derivation]
    in_place: frozenset[str]
    constants: Mapping[str, Mapping[str, Constant]]
    keeps_addresses: bool
    context: Context
    act_dtype: torch.dtype
    gate: ProcessingGate

    @cached_property
    def resident(self) -> Mapping[str, torch.Tensor]:
        """All that has memory wherever weights have it: what is live, derived or constant, by name or path."""
        tensors = dict(self.live)
        if not self.keeps_addresses:  # what is derived is new each time, and constants keep their memory
            return tensors
        for derivation in self.derivations.values():
            tensors |= derivation.results
        for constants in self.constants.values():
            tensors |= {path: each.tensor for path, each in constants.items()}
        return tensors

    def beside(self, groups: Iterable[str]) -> list[str]:
        """What of `resident` is written when these groups are committed, beside their live weights."""
        derivations = [self.derivations[name] for name in groups if name in self.derivations]
        constants = (path for each in derivations for name in each.reached for path in self.constants.get(name, ()))
        return [*(path for each in derivations for path in each.results), *constants]

    def bind(self, group: CommitGroup, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make tensors in loader layout, by buffer, the modules' parameters and buffers, as at load."""
        for name in group.storages:
            for binding in self.traced.storages[name].bindings:
                binding.put(self.modules, tensors[name])

    def stand_ins(self, name: str) -> dict[str, torch.Tensor]:
        """Other parameters over the memory of a group's live ones, by storage.

        vLLM gets these to process: it may let a parameter lie elsewhere (`.data`, since 0.33), and live ones must not.
        """
        live = (self.traced.storages[each] for each in self.traced.groups[name].storages if each in self.live)
        return {storage.name: storage.create(flat_view(self.live[storage.name].detach())) for storage in live}

    @contextlib.contextmanager
    def as_loaded(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Derivation]:
        """Within this context a group's modules are as the loader left them and hold these tensors, by storage."""
        group, derivation = self.traced.groups[name], self.derivations[name]
        try:
            with derivation.as_loaded(tensors):
                self.bind(group, tensors)
                yield derivation
        finally:
            for storage in (self.traced.storages[each] for each in group.storages if each in self.live):
                for binding in storage.bindings:
                    binding.put(self.modules, self.live[storage.name])

    def restore_constants(self, names: Iterable[str]) -> None:
        """Give the constants of these modules the values that they had before the processing."""
        for constant in self.constants_of(names):
            constant.restore()

    def constants_of(self, names: Iterable[str]) -> list[Constant]:
        """Those of these modules."""
        return [each for name in names for each in self.constants.get(name, {}).values()]

    def lasting_constants(self) -> list[str]:
        """The modules whose constants no commit restores."""
        return sorted(self.constants.keys() - {name for each in self.derivations.values() for name in each.reached})

    @contextlib.contextmanager
    def constants_restored(self, names: Iterable[str]) -> Iterator[None]:
        """Within this context the constants of these modules are as before the processing, and then as they were."""
        constants = self.constants_of(names)
        present = [each.tensor.clone() for each in constants]
        try:
            for each in constants:
                each.restore()
            yield
        finally:
            for each, value in zip(constants, present, strict=True):
                replace(each, value=value).restore()

    def process(self, derivation: Derivation, modules: Mapping[str, torch.nn.Module] | None = None) -> None:
        """Run vLLM's own post-load processing of the weights that are bound; default: in the model itself.

        Where it is collective, so is this; raises as `ProcessingGate.meet`.
        """
        self.gate.meet(f"processing {'' if modules is None else 'a copy of '}{derivation.first}")
        modules = self.modules if modules is None else modules
        for name in derivation.methods:
            postload.process(modules[name])
        for name in derivation.attention:
            postload.process_attention(modules[name], self.act_dtype)


def trace_model(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], rank: int
) -> TracedModel:
    """Trace the loader of a freshly constructed model; its parameters are set to zero, those to be processed to marks.

    Args:
        model: a vLLM model whose weights have not been processed.
        tensors: canonical names and shapes: those of a checkpoint on disk.
        dtypes: of all these tensors.
        rank: global rank.

    Raises ModelError or ParameterMismatchError; the model cannot be used then.
    """
    materialize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trace = trace_loader(cast(LoadWeights, model.load_weights), tensors, dtypes)
    if trace.staged:
        logger.warning(
            "%d canonical tensors cannot be traced and go through the model's own loader at every reshard: %s",
            len(trace.staged),
            ", ".join(trace.staged),
        )
    written = {copy.storage for copy in trace.copies} | {write.storage for write in trace.staged_writes}
    storages = {storage.name: storage for storage in take_inventory(model, written)}
    groups = find_groups(model, list(storages.values()), trace)
    group_of = {buffer: name for name, group in groups.items() for buffer in group.buffers}
    padding = postload.vocabulary_padding(model)
    layout = build_layout(rank, tensors, dtypes, list(storages.values()), trace, padding, group_of)

    model.eval()  # as vLLM does later: the mode is none of what the processing changes
    loaded = capture(dict(model.named_modules()), storages, groups)
    return TracedModel(model, rank, layout, dtypes, groups, storages, trace.staged, loaded)


def unwritten_extents(layout: Layout) -> dict[str, tuple[Extent, ...]]:
    """Buffer name -> intervals that no transfer writes: padding, or all of it where the model's loader writes."""
    num_written: Counter[str] = Counter()
    for shard in layout.shards:
        num_written[shard.place.buffer.name] += shard.region.numel
    unwritten = {}
    for buffer_id, buffer in layout.buffers.items():
        num_padding = sum(extent.stop - extent.start for extent in buffer.padding)
        is_whole = num_written[buffer_id.name] + num_padding == buffer.numel
        unwritten[buffer_id.name] = buffer.padding if is_whole else (Extent(0, buffer.numel),)
    return unwritten
