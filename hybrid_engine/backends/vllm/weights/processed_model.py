"""What vLLM's post-load processing made of a model, found by comparing it before and after; how groups are committed.

A storage that the loader fills is *live* where every module still holds it in the same form, and with the values that
were there: new weights are written into it, and views of it (MLA's `W_UV`) need nothing. What a module holds beside
live storages, and did not hold before, was *derived* from weights: derivation.py makes it anew. So may have been what
it writes into tensors that were there before, and numbers. No class of vLLM's decides.

Where addresses must stay, every derivation is rehearsed once with other values. What does not come back in the same
form, or cannot be copied, is an error here, before any switch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.derivation import Change, Constant, Derivation, Sentinels, same_bytes
from hybrid_engine.backends.vllm.weights.forward_state import ForwardState
from hybrid_engine.backends.vllm.weights.groups import STAGED, CommitGroup
from hybrid_engine.backends.vllm.weights.postload import display, module_tensors
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import Context, TracedModel
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights, flat_view, storage_key
from hybrid_engine.errors import ModelError, ReshardError

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its loader-layout tensor, filled, before vLLM processes it."""


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
        barrier: which ranks pass together before each run of the processing, where that is collective.
        forward_state: what modules hold as long as there was no forward.
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
    barrier: ProcessingBarrier
    forward_state: ForwardState = field(default_factory=ForwardState)

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

    def derived_with(self, groups: Iterable[str]) -> list[str]:
        """What of `resident` is written when these groups are committed, beside their live weights."""
        derivations = [self.derivations[name] for name in groups if name in self.derivations]
        constants = (path for each in derivations for name in each.reached for path in self.constants.get(name, ()))
        return [*(path for each in derivations for path in each.results), *constants]

    # -- commits ------------------------------------------------------------------------------------------------------

    def commit(self, name: str, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
        """Bind a group's tensors as at load, then have vLLM derive again what it derived from them.

        Args:
            name: of the group.
            tensors: filled, by buffer; each is removed once it is not needed.
            observe: is shown every parameter.

        Memory: loader layout and what is made of it, module by module; where addresses are kept, of all the group.
        """
        derivation = self.derivations.get(name)
        if derivation is None:
            self.bind(name, tensors)
            self._load(name, tensors, observe)
        elif self.keeps_addresses:
            tensors.update(self._aliases(name))
            with self.as_loaded(name, tensors):
                self._derive(name, derivation, tensors, observe)
                made = module_tensors(self.modules, derivation.reached).outside(derivation.known)
                if problems := derivation.misfits(made):
                    raise ModelError("; ".join(problems))
                derivation.renew(made)
        else:
            derivation.load(tensors)
            self.bind(name, tensors)
            self._derive(name, derivation, tensors, observe)

    def drop(self, name: str) -> None:
        """Forget what vLLM derived from a group's weights, and those that are not live: their memory is free then."""
        if self.keeps_addresses:
            return
        if name in self.derivations:
            tensors = self.dropped(name)
            self.derivations[name].load(tensors)
            self.bind(name, tensors)

    def dropped(self, name: str) -> dict[str, torch.Tensor]:
        """What a group's modules hold of its weights once these are dropped, by storage."""
        storages = self.traced.storages_of(name)
        return {each.name: self.live.get(each.name, each.placeholder()) for each in storages}

    def process(self, derivation: Derivation) -> None:
        """Run vLLM's own post-load processing of the weights that are bound.

        Where it is collective, so is this; raises as `ProcessingBarrier.wait`.
        """
        self.barrier.wait(f"processing {derivation.first}")
        for name in derivation.methods:
            postload.process(self.modules[name])
        for name in derivation.attention:
            postload.process_attention(self.modules[name], self.act_dtype)

    @contextlib.contextmanager
    def as_loaded(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within this context a group's modules are as the loader left them and hold these tensors, by storage."""
        try:
            with self.derivations[name].as_loaded(tensors):
                self.bind(name, tensors)
                yield
        finally:
            for storage in self.traced.storages_of(name):
                if storage.name in self.live:
                    for binding in storage.bindings:
                        binding.put(self.modules, self.live[storage.name])

    def restore_constants(self, names: Iterable[str]) -> None:
        """Give the constants of these modules the values that they had before the processing."""
        for constant in self.constants_of(names):
            constant.restore()

    def constants_of(self, names: Iterable[str]) -> list[Constant]:
        return [each for name in names for each in self.constants.get(name, {}).values()]

    def lasting_constants(self) -> list[str]:
        """The modules whose constants no commit restores."""
        return sorted(self.constants.keys() - {name for each in self.derivations.values() for name in each.reached})

    def bind(self, group: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make tensors in loader layout, by buffer, the modules' parameters and buffers, as at load."""
        for storage in self.traced.storages_of(group):
            for binding in storage.bindings:
                binding.put(self.modules, tensors[storage.name])

    def _aliases(self, group: str) -> dict[str, torch.Tensor]:
        """Other parameters over the memory of a group's live ones, by storage.

        vLLM gets these to process: it may let a parameter lie elsewhere (`.data`, since 0.33), and live ones must not.
        """
        live = (storage for storage in self.traced.storages_of(group) if storage.name in self.live)
        return {storage.name: storage.create(flat_view(self.live[storage.name].detach())) for storage in live}

    def _derive(self, name: str, derivation: Derivation, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
        self.restore_constants(derivation.reached)
        self._load(name, tensors, observe)
        self.process(derivation)

    def _load(self, name: str, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
        """Have the model's own loader write what only it can; then nobody but the modules holds the tensors."""
        group = self.traced.groups[name]
        if group.staged:
            staged = [(each, tensors.pop(STAGED + each)) for each in group.staged]
            cast(LoadWeights, self.traced.model.load_weights)(iter(staged))
        for storage in group.storages:
            observe(storage, tensors.pop(storage))


# -- inspection --------------------------------------------------------------------------------------------------------


def inspect_model(
    traced: TracedModel,
    context: Context,
    act_dtype: torch.dtype,
    keeps_addresses: bool,
    barrier: ProcessingBarrier | None = None,
    has_graphs: bool = False,
) -> ProcessedModel:
    """Find out what vLLM's post-load processing, which is over, made of a model.

    Args:
        traced: the model before it.
        context: entered around every later run of it.
        act_dtype: of the model's activations, which attention's processing is told.
        keeps_addresses: whether what vLLM computes with must stay where it is.
        barrier: of the ranks that process these weights together; default: each by itself.
        has_graphs: whether vLLM captures graphs.

    Raises ModelError with everything that cannot be renewed, and as `ProcessingBarrier.wait` where another rank fails;
    the model cannot be used then.
    """
    barrier = barrier or ProcessingBarrier()
    with barrier.section():
        model = _inspected(traced, context, act_dtype, keeps_addresses, barrier)
    barrier.reset()
    for name in traced.snapshot.with_sentinels & model.live.keys():
        flat_view(model.live[name].detach()).zero_()
    return replace(model, forward_state=_forward_state(model, has_graphs))


def _forward_state(model: ProcessedModel, has_graphs: bool) -> ForwardState:
    """Of a model that no forward has touched."""
    written = model.constants_of(model.constants)
    weights = {storage_key(tensor) for tensor in (*model.live.values(), *(each.tensor for each in written))}
    if model.keeps_addresses:
        results = (tensor for each in model.derivations.values() for tensor in each.results.values())
        return ForwardState.of(model.modules, (), weights | set(map(storage_key, results)), has_graphs)
    with contextlib.ExitStack() as undo:
        for name in model.derivations:
            undo.enter_context(model.as_loaded(name, model.dropped(name)))
        renewed = [change for each in model.derivations.values() for change in each.changes]
        return ForwardState.of(model.modules, renewed, weights, has_graphs)


def _inspected(
    traced: TracedModel, context: Context, act_dtype: torch.dtype, keeps_addresses: bool, barrier: ProcessingBarrier
) -> ProcessedModel:
    modules = dict(traced.model.named_modules())
    live, written = traced.snapshot.live(modules), traced.snapshot.written()
    known = traced.snapshot.constants | {storage_key(tensor) for tensor in live.values()}
    found = {name: _derivation(traced, modules, group, live, known, written) for name, group in traced.groups.items()}
    derivations = {name: derivation for name, derivation in found.items() if derivation is not None}
    computed_with = {storage_key(tensor) for each in derivations.values() for tensor in each.results.values()}
    in_place = frozenset(each.name for each in traced.storages.values() if each.key in computed_with)
    for name, each in derivations.items():
        if keeps_addresses:  # vLLM may wrap a method later
            methods = tuple(_reference_to_method(modules[module]) for module in each.methods)
            derivations[name] = replace(each, changes=(*each.changes, *methods))
        else:  # results would keep the memory of these weights
            derivations[name] = replace(each, results={}, numbers={})
    constants = _constants(traced, modules, derivations, written, keeps_addresses)
    model = ProcessedModel(
        traced, modules, live, derivations, in_place, constants, keeps_addresses, context, act_dtype, barrier
    )
    faults = _lost(model)
    if keeps_addresses:
        faults += _out_of_reach(model, known)
        with torch.no_grad(), context():
            idle = _rehearse_all(model, faults)
        derivations = {name: each for name, each in derivations.items() if name not in idle}
        constants = _constants(traced, modules, derivations, written, keeps_addresses)
        model = replace(model, derivations=derivations, constants=constants)
    if faults:
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise ModelError(f"vLLM computes with weights that cannot be renewed ({len(faults)}):\n{lines}")
    return model


def _derivation(
    traced: TracedModel,
    modules: Mapping[str, torch.nn.Module],
    group: CommitGroup,
    live: Mapping[str, torch.Tensor],
    known: Collection[int],
    written: Mapping[str, object],
) -> Derivation | None:
    """What was derived from one group's weights, if anything was, or may have been: numbers, what is written in place.

    `written`: the modules whose constants were.
    """
    snapshot, again = traced.snapshot, dict[str, tuple[str, ...]]()
    gone = {binding.module for name in group.storages if name not in live for binding in traced.storages[name].bindings}
    for name in (*group.methods, *group.attention):
        reached = postload.modules_processed(modules, name)
        found = module_tensors(modules, reached)
        has_changed = not gone.isdisjoint(reached) or not written.keys().isdisjoint(reached)
        has_changed = has_changed or snapshot.has_new_numbers(reached, found)
        if has_changed or found.outside(known) or snapshot.new_sealed(reached, found):
            again[name] = reached
    if not again:
        return None
    reached = tuple(dict.fromkeys(each for names in again.values() for each in names))
    found = module_tensors(modules, reached)
    return Derivation(
        methods=tuple(name for name in group.methods if name in reached),  # also what it wrote without weights
        attention=tuple(name for name in group.attention if name in again),
        reached=reached,
        changes=tuple(snapshot.changes(reached, live)),
        known=frozenset(known),
        results=found.outside(known),
        numbers=found.numbers,
    )


def _reference_to_method(module: torch.nn.Module) -> Change:
    table = next(table for table in (vars(module), module._modules) if "quant_method" in table)
    return Change(table, "quant_method", table["quant_method"])


def _constants(
    traced: TracedModel,
    modules: Mapping[str, torch.nn.Module],
    derivations: Mapping[str, Derivation],
    written: Mapping[str, Mapping[str, Constant]],
    keeps_addresses: bool,
) -> dict[str, dict[str, Constant]]:
    """By module and path, as `ProcessedModel.constants`; of those in `written`, the ones that a derivation renews."""
    renewed = {module for derivation in derivations.values() for module in derivation.reached}
    found = {name: dict(constants) for name, constants in written.items() if name in renewed}
    if not keeps_addresses:
        return found
    device = next(iter(traced.storages.values())).device
    apart = {storage_key(each.tensor) for constants in found.values() for each in constants.values()}
    others = traced.snapshot.constants - apart - {storage_key(buffer) for buffer in traced.model.buffers()}
    for name in modules:
        for path, tensor in module_tensors(modules, [name]).tensors.items():
            if tensor.device == device and tensor.numel() and storage_key(tensor) in others:
                found.setdefault(name, {})[path] = Constant(tensor.detach(), tensor.detach().cpu().clone())
    return found


def _lost(model: ProcessedModel) -> list[str]:
    """Weights that are not live, and in no module whose processing runs again."""
    again = {name for each in model.derivations.values() for name in each.reached}
    return [
        _fault(model, binding.module, f"{binding.name} was changed after loading, by something else")
        for name, storage in model.traced.storages.items()
        for binding in storage.bindings
        if name not in model.live and binding.module not in again
    ]


def _out_of_reach(model: ProcessedModel, known: frozenset[int]) -> list[str]:
    """What was derived and cannot be written, or nobody can make again."""
    faults = []
    for name, derivation in model.derivations.items():
        known = known | {storage_key(tensor) for tensor in derivation.results.values()}
        found = module_tensors(model.modules, derivation.reached)
        sealed = model.traced.snapshot.new_sealed(derivation.reached, found).items()
        faults += [
            _fault(model, derivation.first, f"{display(path)} is a {kind}, which hides memory") for path, kind in sealed
        ]
        if not (derivation.results or sealed or _may_be_idle(model, name)):
            faults.append(_fault(model, derivation.first, "nothing that it computes with can be found"))
    lost = {binding.name for storage in model.traced.storages.values() for binding in storage.bindings}
    for name, module in model.modules.items():
        if not postload.is_processed(module):
            made = map(display, module_tensors(model.modules, [name]).outside(known))
            strays = (path for path in made if path not in lost)
            faults += [_fault(model, name, f"{path} was made after loading, by something else") for path in strays]
    return faults


def _may_be_idle(model: ProcessedModel, name: str) -> bool:
    """Whether a group's weights are computed with as they are, and all that its processing wrote may not depend on
    them: numbers, and what was there before."""
    is_live = all(each in model.live for each in model.traced.groups[name].storages)
    return is_live and not model.derivations[name].results


def _rehearse_all(model: ProcessedModel, faults: list[str]) -> set[str]:
    """Rehearse every derivation, and add to `faults`; returns the groups in which nothing depends on the weights."""
    idle = set()
    for name, derivation in model.derivations.items():
        may_be_idle = _may_be_idle(model, name)
        constants = model.constants_of(derivation.reached) if may_be_idle else []
        before = [each.tensor.clone() for each in constants]
        found = _rehearse(model, name)
        faults += found
        if model.barrier.is_over:  # in its collectives the others would not be met
            break
        if may_be_idle:  # on all ranks alike, whatever was found on this one
            is_renewed = not all(same_bytes(each.tensor, value) for each, value in zip(constants, before, strict=True))
            if not model.barrier.wait(f"what depends on the weights of {name}", wish=bool(found) or is_renewed):
                idle.add(name)
    return idle


def _rehearse(model: ProcessedModel, group: str) -> list[str]:
    """Derive what a group computes with from other values; see whether it can be, and has been, copied into place.

    Raises as `ProcessingBarrier.wait`; a failure of its own breaks the barrier.
    """
    storages, derivation, tensors = model.traced.storages_of(group), model.derivations[group], {}
    for storage in storages:
        flat = torch.zeros(storage.numel, dtype=storage.dtype, device=storage.device)
        if storage.name in model.live:
            flat = flat_view(model.live[storage.name].detach())
        if storage.dtype.is_floating_point:
            Sentinels.REHEARSED.write(flat)
        tensors[storage.name] = storage.create(flat)
    try:
        with model.as_loaded(group, tensors):
            model.restore_constants(derivation.reached)
            model.process(derivation)
            found = module_tensors(model.modules, derivation.reached)
            made = found.outside(derivation.known)
            problems = derivation.misfits(made) or derivation.strays(made, found.numbers)
            problems = problems or _stale(derivation, made, {storage.key for storage in storages})
            if not problems:
                derivation.renew(made)
    except ReshardError:  # another rank's
        raise
    except Exception as error:  # vLLM's, of any kind: its message goes into one report with the others
        model.barrier.abandon()
        return [_fault(model, derivation.first, f"its processing cannot run again: {type(error).__name__}: {error}")]
    problems = problems or [
        f"{display(path)} cannot be written in place"
        for path in made
        if not same_bytes(made[path], derivation.results[path])
    ]
    return [_fault(model, derivation.first, problem) for problem in problems]


def _stale(derivation: Derivation, made: Mapping[str, torch.Tensor], loaded: Collection[int]) -> list[str]:
    """What still lies in one of the storages that vLLM's loader filled first."""
    keys = {path: storage_key(tensor) for path, tensor in made.items()}
    return [
        f"{display(path)} refers to the first weights from where that cannot be changed"
        for path, key in keys.items()
        if key in loaded and key == storage_key(derivation.results[path])
    ]


def _fault(model: ProcessedModel, name: str, what: str) -> str:
    kind, remedy = postload.described(model.modules[name])
    return f"{name or 'the model'} ({kind}): {what}. {remedy}"
