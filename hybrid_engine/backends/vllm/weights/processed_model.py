"""A model after vLLM's post-load processing, compared with its snapshot, and the commit of groups.

A storage that the loader fills is *live* if every module still holds it in the same form and with
the same values: new weights are written into it, and views of it (MLA's `W_UV`) need no work.
Tensors outside of live storages that a module did not hold before were *derived* from weights, and
derivation.py derives them again. Writes into tensors that existed before, and numbers, may have
been derived as well. No class of vLLM decides this.

If addresses must stay, every derivation is rehearsed once with other values. A result that does not
come back in the same form, or cannot be copied, is an error here, before any switch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.derivation import (
    Change,
    Constant,
    Constants,
    Derivation,
    Sentinels,
    same_bytes,
)
from hybrid_engine.backends.vllm.weights.forward_state import ForwardState
from hybrid_engine.backends.vllm.weights.groups import STAGED, CommitGroup, Names
from hybrid_engine.backends.vllm.weights.postload import display, module_tensors
from hybrid_engine.backends.vllm.weights.processing_barrier import ProcessingBarrier
from hybrid_engine.backends.vllm.weights.traced_model import Context, TracedModel
from hybrid_engine.backends.vllm.weights.tracing import (
    LoadWeights,
    NamedModules,
    flat_view,
    storage_key,
)
from hybrid_engine.errors import ModelError, ReshardError
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its filled tensor in loader layout, before processing."""


@dataclass(frozen=True)
class ProcessedModel:
    """A model whose weights vLLM has processed, with everything that a commit needs.

    Attributes:
        traced: the model before the processing.
        modules: modules by name.
        live: storage -> its parameter, if vLLM computes with the loader's layout. New weights are
            written there, because other objects may refer to it.
        derivations: group -> everything that vLLM derived from its weights, if anything.
        in_place: storages in whose memory the processing leaves other values; vLLM goes on to
            compute with that memory.
        constants: module -> path -> tensor that is neither a weight nor derived again, with its
            value before the processing. These are tensors that the processing writes in place. If
            addresses must stay, these are also all others but buffers, because vLLM's sleep mode
            loses their values.
        keeps_addresses: whether derived tensors must stay at their addresses.
        context: context of the processing, see `Context`.
        act_dtype: dtype of the model's activations.
        barrier: synchronises ranks before each run of a collective processing.
        forward_state: contents of the modules before any forward.
        contexts: first module of a derivation -> context of its processing, if it differs.
    """

    traced: TracedModel
    modules: NamedModules
    live: Tensors
    derivations: Mapping[str, Derivation]
    in_place: frozenset[str]
    constants: Constants
    keeps_addresses: bool
    context: Context
    act_dtype: torch.dtype
    barrier: ProcessingBarrier
    forward_state: ForwardState = field(default_factory=ForwardState)
    contexts: Mapping[str, Context] = field(default_factory=dict)

    @cached_property
    def resident(self) -> Tensors:
        """All tensors, by name or path, that have memory whenever weights have it."""
        tensors = dict(self.live)
        if not self.keeps_addresses:
            # Derived tensors are new each time, and constants keep their memory.
            return tensors
        for derivation in self.derivations.values():
            tensors |= derivation.results
        for constants in self.constants.values():
            tensors |= {path: constant.tensor for path, constant in constants.items()}
        return tensors

    def derived_with(self, groups: Iterable[str]) -> list[str]:
        """Return names of `resident` tensors, but live weights, that a commit of groups writes."""
        derivations = [self.derivations[name] for name in groups if name in self.derivations]
        results = [path for derivation in derivations for path in derivation.results]
        reached = [name for derivation in derivations for name in derivation.reached]
        return results + [path for name in reached for path in self.constants.get(name, ())]

    # -- commits -----------------------------------------------------------------------------------

    def commit(self, name: str, tensors: TensorDict, observe: Observer) -> None:
        """Bind a group's tensors as at load, then have vLLM derive its tensors from them again.

        Args:
            name: name of the group.
            tensors: filled tensors by buffer; each is removed once it is not needed.
            observe: called with every parameter.

        Memory: loader layout and derived tensors, module by module; if addresses are kept, of the
        whole group.
        """
        derivation = self.derivations.get(name)
        if derivation is None:
            self.bind(name, tensors)
            self._load(name, tensors, observe)
        elif self.keeps_addresses:
            # Live tensors are filled already; vLLM gets other parameters over their memory.
            tensors.update(self._aliases(name))
            with self.as_loaded(name, tensors):
                self._derive(name, derivation, tensors, observe)
                contents = module_tensors(self.modules, derivation.reached)
                derived = contents.outside(derivation.known)
                problems = derivation.misfits(derived)
                if problems:
                    raise ModelError("; ".join(problems), code="derivation-changed")
                derivation.renew(derived)
        else:
            derivation.load(tensors)
            self.bind(name, tensors)
            self._derive(name, derivation, tensors, observe)

    def drop(self, name: str) -> None:
        """Drop a group's derived tensors and the weights that are not live, and so free them."""
        if self.keeps_addresses:
            return
        if name in self.derivations:
            tensors = self.dropped(name)
            self.derivations[name].load(tensors)
            self.bind(name, tensors)

    def dropped(self, name: str) -> TensorDict:
        """Return the tensors that a group's modules hold after `drop`, by storage."""
        storages = self.traced.storages_of(name)
        return {
            storage.name: self.live.get(storage.name, storage.placeholder()) for storage in storages
        }

    def process(self, derivation: Derivation) -> None:
        """Run vLLM's post-load processing of the weights that are bound.

        Collective if the processing is. Raises as `ProcessingBarrier.wait` does.
        """
        self.barrier.wait(f"processing {derivation.first}")
        with self.contexts.get(derivation.first, nullcontext)():
            for name in derivation.methods:
                postload.process(self.modules[name])
            for name in derivation.attention:
                cast(Any, self.modules[name]).process_weights_after_loading(self.act_dtype)

    @contextmanager
    def as_loaded(self, name: str, tensors: Tensors) -> Iterator[None]:
        """Roll a group's modules back to the state after loading, and bind `tensors`, by storage.

        The modules return to their present state at the end of the context.
        """
        try:
            with self.derivations[name].as_loaded(tensors):
                self.bind(name, tensors)
                yield
        finally:
            # A derivation does not record live parameters, so its rollback does not restore them.
            for storage in self.traced.storages_of(name):
                if storage.name in self.live:
                    for binding in storage.bindings:
                        binding.put(self.modules, self.live[storage.name])

    def restore_constants(self, names: Iterable[str]) -> None:
        """Give the constants of these modules their values from before the processing."""
        for constant in self.constants_of(names):
            constant.restore()

    def constants_of(self, names: Iterable[str]) -> list[Constant]:
        return [constant for name in names for constant in self.constants.get(name, {}).values()]

    def bind(self, group: str, tensors: Tensors) -> None:
        """Make tensors in loader layout, by buffer, the modules' parameters and buffers."""
        for storage in self.traced.storages_of(group):
            for binding in storage.bindings:
                binding.put(self.modules, tensors[storage.name])

    def _aliases(self, group: str) -> TensorDict:
        """Return new parameters over the memory of a group's live ones, by storage.

        vLLM processes the aliases: since 0.33 it may move a parameter to other memory (`.data`),
        and live parameters must not move.
        """
        return {
            storage.name: storage.create(flat_view(self.live[storage.name].detach()))
            for storage in self.traced.storages_of(group)
            if storage.name in self.live
        }

    def _derive(
        self,
        name: str,
        derivation: Derivation,
        tensors: TensorDict,
        observe: Observer,
    ) -> None:
        self.restore_constants(derivation.reached)
        self._load(name, tensors, observe)
        self.process(derivation)

    def _load(self, name: str, tensors: TensorDict, observe: Observer) -> None:
        """Have the model's own loader write the staged tensors, and empty `tensors`.

        Afterwards only the modules refer to the tensors, so that the processing can free them.
        """
        group = self.traced.groups[name]
        if group.staged:
            staged = [(tensor, tensors.pop(STAGED + tensor)) for tensor in group.staged]
            load_weights = cast(LoadWeights, self.traced.model.load_weights)
            load_weights(iter(staged))
        for storage in group.storages:
            observe(storage, tensors.pop(storage))


# -- inspection ------------------------------------------------------------------------------------


def inspect_model(
    traced: TracedModel,
    context: Context,
    act_dtype: torch.dtype,
    keeps_addresses: bool,
    barrier: ProcessingBarrier | None = None,
    has_graphs: bool = False,
) -> ProcessedModel:
    """Compare a model after vLLM's post-load processing with its snapshot before it.

    Args:
        traced: the model before the processing.
        context: entered around every later run of the processing.
        act_dtype: dtype of the model's activations, an argument of attention's processing.
        keeps_addresses: whether tensors that vLLM computes with must stay at their addresses.
        barrier: barrier of the ranks that process these weights together; by default, this rank
            waits for no other.
        has_graphs: whether vLLM captures graphs.

    Raises ModelError with everything that cannot be renewed, and as `ProcessingBarrier.wait` does
    if another rank fails. The model is unusable then.
    """
    barrier = barrier or ProcessingBarrier()
    with barrier.section():
        model = _inspected(traced, context, act_dtype, keeps_addresses, barrier)
    barrier.reset()
    for name in traced.snapshot.with_sentinels & model.live.keys():
        # The sentinels have served their purpose.
        flat_view(model.live[name].detach()).zero_()
    return replace(model, forward_state=_forward_state(model, has_graphs))


def _forward_state(model: ProcessedModel, has_graphs: bool) -> ForwardState:
    """Return the contents of a model that no forward has touched."""
    written = [constant.tensor for constant in model.constants_of(model.constants)]
    weights = {storage_key(tensor) for tensor in (*model.live.values(), *written)}
    derivations = model.derivations.values()
    if model.keeps_addresses:
        for derivation in derivations:
            weights.update(map(storage_key, derivation.results.values()))
        return ForwardState.of(model.modules, (), weights, has_graphs)
    # Derived tensors are new after each commit, so the recorded contents must not include them.
    with ExitStack() as undo:
        for name in model.derivations:
            undo.enter_context(model.as_loaded(name, model.dropped(name)))
        renewed = [change for derivation in derivations for change in derivation.changes]
        return ForwardState.of(model.modules, renewed, weights, has_graphs)


def _inspected(
    traced: TracedModel,
    context: Context,
    act_dtype: torch.dtype,
    keeps_addresses: bool,
    barrier: ProcessingBarrier,
) -> ProcessedModel:
    modules = dict(traced.model.named_modules())
    live = traced.snapshot.live(modules)
    written = traced.snapshot.written()
    # Tensors that existed before the processing and are not weights, and weights that a switch
    # fills in place. Any other tensor was derived.
    known = traced.snapshot.constants | {storage_key(tensor) for tensor in live.values()}
    derivations: dict[str, Derivation] = {}
    computed_with: set[int] = set()  # storages of derived tensors
    for name, group in traced.groups.items():
        derivation = _derivation(traced, modules, group, live, known, written)
        if derivation is None:
            continue
        computed_with.update(map(storage_key, derivation.results.values()))
        if keeps_addresses:
            # vLLM may wrap a method later, so the reference to it is rolled back as well.
            methods = tuple(_reference_to_method(modules[module]) for module in derivation.methods)
            derivation = replace(derivation, changes=(*derivation.changes, *methods))
        else:
            # Results would keep the memory of these weights alive.
            derivation = replace(derivation, results={}, numbers={})
        derivations[name] = derivation
    storages = traced.storages.values()
    model = ProcessedModel(
        traced=traced,
        modules=modules,
        live=live,
        derivations=derivations,
        in_place=frozenset(storage.name for storage in storages if storage.key in computed_with),
        constants=_constants(traced, modules, derivations, written, keeps_addresses),
        keeps_addresses=keeps_addresses,
        context=context,
        act_dtype=act_dtype,
        barrier=barrier,
    )
    faults = _lost(model)
    if keeps_addresses:
        faults += _out_of_reach(model, known)
        with torch.no_grad(), context():
            idle = _rehearse_all(model, faults)
        # Groups in which no value depends on the weights need no processing at a commit.
        derivations = {
            name: derivation for name, derivation in derivations.items() if name not in idle
        }
        # Once more, because constants that only idle groups reach are not renewed.
        constants = _constants(traced, modules, derivations, written, keeps_addresses)
        model = replace(model, derivations=derivations, constants=constants)
    if faults:
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise ModelError(
            f"vLLM computes with weights that cannot be renewed ({len(faults)}):\n{lines}",
            code="weights-not-renewable",
        )
    return model


def _derivation(
    traced: TracedModel,
    modules: NamedModules,
    group: CommitGroup,
    live: Tensors,
    known: Collection[int],
    written: Mapping[str, object],
) -> Derivation | None:
    """Return everything that may have been derived from one group's weights; None if nothing.

    Numbers and tensors written in place may have been derived. `written`: modules whose constants
    were written.
    """
    snapshot = traced.snapshot
    replaced = {
        binding.module
        for name in group.storages
        if name not in live
        for binding in traced.storages[name].bindings
    }
    derived_by: dict[str, Names] = {}  # processed module -> modules it may change
    for name in (*group.methods, *group.attention):
        reached = postload.modules_processed(modules, name)
        contents = module_tensors(modules, reached)
        if (
            not replaced.isdisjoint(reached)
            or not written.keys().isdisjoint(reached)
            or snapshot.has_new_numbers(reached, contents)
            or contents.outside(known)
            or snapshot.new_sealed(reached, contents)
        ):
            derived_by[name] = reached
    if not derived_by:
        return None
    reached = tuple(dict.fromkeys(name for names in derived_by.values() for name in names))
    contents = module_tensors(modules, reached)
    return Derivation(
        # A method inside a reached module may have written there without deriving from weights.
        methods=tuple(name for name in group.methods if name in reached),
        attention=tuple(name for name in group.attention if name in derived_by),
        reached=reached,
        changes=tuple(snapshot.changes(reached, live)),
        known=frozenset(known),
        results=contents.outside(known),
        numbers=contents.numbers,
    )


def _reference_to_method(module: torch.nn.Module) -> Change:
    # A method that is a module is registered as a child.
    table = next(table for table in (vars(module), module._modules) if "quant_method" in table)
    return Change(table, "quant_method", table["quant_method"])


def _constants(
    traced: TracedModel,
    modules: NamedModules,
    derivations: Mapping[str, Derivation],
    written: Constants,
    keeps_addresses: bool,
) -> Constants:
    """Return `ProcessedModel.constants`; of `written` only those that a derivation renews."""
    renewed = {name for derivation in derivations.values() for name in derivation.reached}
    constants = {name: dict(paths) for name, paths in written.items() if name in renewed}
    if not keeps_addresses:
        return constants
    device = next(iter(traced.storages.values())).device
    included = {
        storage_key(constant.tensor) for paths in constants.values() for constant in paths.values()
    }
    buffers = {storage_key(buffer) for buffer in traced.model.buffers()}
    others = traced.snapshot.constants - included - buffers
    for name in modules:
        for path, tensor in module_tensors(modules, [name]).tensors.items():
            if tensor.device == device and tensor.numel() and storage_key(tensor) in others:
                value = tensor.detach().cpu().clone()
                constants.setdefault(name, {})[path] = Constant(tensor.detach(), value)
    return constants


def _lost(model: ProcessedModel) -> list[str]:
    """Return faults for weights that are not live and that no repeated processing covers."""
    processed = {name for derivation in model.derivations.values() for name in derivation.reached}
    return [
        _fault(
            model,
            binding.module,
            f"{binding.name} was changed after loading, outside of the processing",
        )
        for name, storage in model.traced.storages.items()
        for binding in storage.bindings
        if name not in model.live and binding.module not in processed
    ]


def _out_of_reach(model: ProcessedModel, known: frozenset[int]) -> list[str]:
    """Return faults for derived values that cannot be written or cannot be derived again."""
    faults = []
    for name, derivation in model.derivations.items():
        known = known | {storage_key(tensor) for tensor in derivation.results.values()}
        contents = module_tensors(model.modules, derivation.reached)
        sealed = model.traced.snapshot.new_sealed(derivation.reached, contents)
        faults += [
            _fault(model, derivation.first, f"{display(path)} is a {kind}, which hides memory")
            for path, kind in sealed.items()
        ]
        if not (derivation.results or sealed or _may_be_idle(model, name)):
            faults.append(
                _fault(
                    model,
                    derivation.first,
                    "none of the tensors that it computes with can be found",
                )
            )
    bound = {
        binding.name for storage in model.traced.storages.values() for binding in storage.bindings
    }
    for name, module in model.modules.items():
        if postload.is_processed(module):
            continue
        # `_lost` reports parameters and buffers that the loader fills.
        for path in module_tensors(model.modules, [name]).outside(known):
            if display(path) not in bound:
                faults.append(
                    _fault(
                        model,
                        name,
                        f"{display(path)} was made after loading, outside of the processing",
                    )
                )
    return faults


def _may_be_idle(model: ProcessedModel, name: str) -> bool:
    """Return whether a group's processing may write nothing that depends on the weights.

    True if its weights are all live and the processing wrote only numbers and existing tensors.
    """
    is_live = all(storage in model.live for storage in model.traced.groups[name].storages)
    return is_live and not model.derivations[name].results


def _rehearse_all(model: ProcessedModel, faults: list[str]) -> set[str]:
    """Rehearse every derivation, and add to `faults`.

    Returns the groups in which no value depends on the weights.
    """
    idle = set()
    for name, derivation in model.derivations.items():
        may_be_idle = _may_be_idle(model, name)
        constants = model.constants_of(derivation.reached) if may_be_idle else []
        before = [constant.tensor.clone() for constant in constants]
        problems = _rehearse(model, name)
        # All derivations are rehearsed, so that one error reports all faults.
        faults += problems
        if model.barrier.is_over:  # this rank would not meet its peers in their collectives
            break
        if may_be_idle:  # the same decision on all ranks, whatever the result on this rank
            # A constant with another value depends on the weights.
            is_renewed = not all(
                same_bytes(constant.tensor, value)
                for constant, value in zip(constants, before, strict=True)
            )
            step = f"what depends on the weights of {name}"
            if not model.barrier.wait(step, wish=bool(problems) or is_renewed):
                idle.add(name)
    return idle


def _rehearse(model: ProcessedModel, group: str) -> list[str]:
    """Derive a group's tensors from other values; return faults if they miss their places.

    Raises as `ProcessingBarrier.wait` does; a failure on this rank breaks the barrier.
    """
    storages = model.traced.storages_of(group)
    derivation = model.derivations[group]
    tensors = {}
    for storage in storages:
        if storage.name in model.live:
            flat = flat_view(model.live[storage.name].detach())
        else:
            flat = torch.zeros(storage.numel, dtype=storage.dtype, device=storage.device)
        if storage.dtype.is_floating_point:
            Sentinels.REHEARSED.write(flat)
        tensors[storage.name] = storage.create(flat)
    try:
        with model.as_loaded(group, tensors):
            model.restore_constants(derivation.reached)
            model.process(derivation)
            contents = module_tensors(model.modules, derivation.reached)
            derived = contents.outside(derivation.known)
            # In this order: a form that differs makes the later comparisons meaningless.
            problems = derivation.misfits(derived) or derivation.strays(derived, contents.numbers)
            if not problems:
                problems = _stale(derivation, derived, {storage.key for storage in storages})
            if not problems:
                derivation.renew(derived)
    except ReshardError:  # another rank's
        raise
    except Exception as error:
        # Any exception of vLLM's: its message joins the other faults in one report.
        model.barrier.abandon()
        problem = f"its processing cannot run again: {type(error).__name__}: {error}"
        return [_fault(model, derivation.first, problem)]
    # After the block the modules have their former entries, so the live results must show the new
    # bytes.
    problems = problems or [
        f"{display(path)} cannot be written in place"
        for path in derived
        if not same_bytes(derived[path], derivation.results[path])
    ]
    return [_fault(model, derivation.first, problem) for problem in problems]


def _stale(derivation: Derivation, derived: Tensors, loaded: Collection[int]) -> list[str]:
    """Return faults for tensors that are still in a storage that vLLM's loader filled first.

    `loaded`: keys of these storages.
    """
    keys = {path: storage_key(tensor) for path, tensor in derived.items()}
    return [
        f"{display(path)} refers to the first weights and cannot be changed there"
        for path, key in keys.items()
        if key in loaded and key == storage_key(derivation.results[path])
    ]


def _fault(model: ProcessedModel, name: str, problem: str) -> str:
    kind, remedy = postload.described(model.modules[name])
    return f"{name or 'the model'} ({kind}): {problem}. {remedy}"
