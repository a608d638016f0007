"""Find out what vLLM's post-load processing did to a model, by looking at it before and after.

A storage that the loader fills is *live* where every module still holds it in the same form, and with the values that
were there: new weights are written into it, and views of it (MLA's `W_UV`) need nothing. What a module holds beside
live storages, and did not hold before, was *derived* from weights: derivation.py makes it anew. So may have been what
it writes into tensors that were there before, and numbers. No class of vLLM's decides.

Where addresses must stay, every derivation is rehearsed once with other values. What does not come back in the same
form, or cannot be copied, is an error here, before any switch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.collective_processing import ProcessingGate
from hybrid_engine.backends.vllm.weights.derivation import Change, Constant, Derivation, same_bytes
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.held import display, held_by, held_by_all
from hybrid_engine.backends.vllm.weights.marks import Mark, is_marked_dtype
from hybrid_engine.backends.vllm.weights.storages import flat_view
from hybrid_engine.backends.vllm.weights.traced_model import Context, ProcessedModel, TracedModel
from hybrid_engine.backends.vllm.weights.tracing import storage_key
from hybrid_engine.errors import ModelError, ReshardError


def look(
    traced: TracedModel,
    context: Context,
    act_dtype: torch.dtype,
    keeps_addresses: bool,
    gate: ProcessingGate | None = None,
) -> ProcessedModel:
    """See what vLLM's post-load processing, which is over, made of a model.

    Args:
        traced: the model before it.
        context: entered around every later run of it.
        act_dtype: of the model's activations, which attention's processing is told.
        keeps_addresses: whether what vLLM computes with must stay where it is.
        gate: of the ranks that process these weights together; default: each by itself.

    Raises ModelError with everything that cannot be renewed, and as `ProcessingGate.meet` where another rank fails; the
    model cannot be used then.
    """
    gate = gate or ProcessingGate()
    with gate.walk():
        model = _looked_at(traced, context, act_dtype, keeps_addresses, gate)
    gate.reopen()
    for name in traced.loaded.marked & model.live.keys():
        flat_view(model.live[name].detach()).zero_()
    return model


def _looked_at(
    traced: TracedModel, context: Context, act_dtype: torch.dtype, keeps_addresses: bool, gate: ProcessingGate
) -> ProcessedModel:
    modules = dict(traced.model.named_modules())
    live, written = traced.loaded.live(modules), traced.loaded.written()
    known = traced.loaded.constants | {storage_key(tensor) for tensor in live.values()}
    found = {name: _derivation(traced, modules, group, live, known, written) for name, group in traced.groups.items()}
    derivations = {name: derivation for name, derivation in found.items() if derivation is not None}
    computed_with = {storage_key(tensor) for each in derivations.values() for tensor in each.results.values()}
    storages = traced.storages.values()
    in_place = frozenset(each.name for each in storages if each.key in computed_with)
    for name, each in derivations.items():
        if keeps_addresses:  # vLLM may wrap a method later
            methods = tuple(_reference_to_method(modules[module]) for module in each.methods)
            derivations[name] = replace(each, changes=(*each.changes, *methods))
        else:  # results would keep the memory of these weights
            derivations[name] = replace(each, results={}, numbers={})
    constants = _constants(traced, modules, derivations, written, keeps_addresses)
    model = ProcessedModel(
        traced, modules, live, derivations, in_place, constants, keeps_addresses, context, act_dtype, gate
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
    loaded, again = traced.loaded, dict[str, tuple[str, ...]]()
    gone = {binding.module for name in group.storages if name not in live for binding in traced.storages[name].bindings}
    for name in (*group.methods, *group.attention):
        reached = postload.modules_processed(modules, name)
        held = held_by_all(modules, reached)
        has_changed = not gone.isdisjoint(reached) or not written.keys().isdisjoint(reached)
        has_changed = has_changed or loaded.has_new_numbers(reached, held)
        if has_changed or held.owned(known) or loaded.new_sealed(reached, held):
            again[name] = reached
    if not again:
        return None
    reached = tuple(dict.fromkeys(each for names in again.values() for each in names))
    held = held_by_all(modules, reached)
    return Derivation(
        methods=tuple(name for name in group.methods if name in reached),  # also what it wrote without weights
        attention=tuple(name for name in group.attention if name in again),
        reached=reached,
        changes=tuple(loaded.changes(reached, live)),
        known=frozenset(known),
        results=held.owned(known),
        numbers=held.numbers,
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
    others = traced.loaded.constants - apart - {storage_key(buffer) for buffer in traced.model.buffers()}
    for name, module in modules.items():
        for path, tensor in held_by(module, name).tensors.items():
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
        held = held_by_all(model.modules, derivation.reached)
        sealed = model.traced.loaded.new_sealed(derivation.reached, held).items()
        faults += [
            _fault(model, derivation.first, f"{display(path)} is a {kind}, which hides memory") for path, kind in sealed
        ]
        if not (derivation.results or sealed or _is_suspected(model, name)):
            faults.append(_fault(model, derivation.first, "nothing that it computes with can be found"))
    lost = {binding.name for storage in model.traced.storages.values() for binding in storage.bindings}
    for name, module in model.modules.items():
        made = () if postload.is_processed(module) else map(display, held_by(module, name).owned(known))
        strays = (path for path in made if path not in lost)
        faults += [_fault(model, name, f"{path} was made after loading, by something else") for path in strays]
    return faults


def _is_suspected(model: ProcessedModel, name: str) -> bool:
    """Whether a group's weights are computed with as they are, and all that its processing wrote may not depend on
    them: numbers, and what was there before."""
    is_live = all(each in model.live for each in model.traced.groups[name].storages)
    return is_live and not model.derivations[name].results


def _rehearse_all(model: ProcessedModel, faults: list[str]) -> set[str]:
    """Rehearse every derivation, and add to `faults`; returns the groups in which nothing depends on the weights."""
    idle = set()
    for name, derivation in model.derivations.items():
        is_suspected = _is_suspected(model, name)
        constants = model.constants_of(derivation.reached) if is_suspected else []
        before = [each.tensor.clone() for each in constants]
        found = _rehearse(model, name)
        faults += found
        if model.gate.is_over:  # in its collectives the others would not be met
            break
        if is_suspected:  # on all ranks alike, whatever was found on this one
            is_renewed = not all(same_bytes(each.tensor, value) for each, value in zip(constants, before, strict=True))
            if not model.gate.meet(f"what depends on the weights of {name}", wish=bool(found) or is_renewed):
                idle.add(name)
    return idle


def _rehearse(model: ProcessedModel, group_name: str) -> list[str]:
    """Derive what a group computes with from other values; see whether it can be, and has been, copied into place.

    Raises as `ProcessingGate.meet`; a failure of its own closes the gate.
    """
    group, derivation = model.traced.groups[group_name], model.derivations[group_name]
    storages, tensors = [model.traced.storages[each] for each in group.storages], {}
    for storage in storages:
        flat = torch.zeros(storage.numel, dtype=storage.dtype, device=storage.device)
        if storage.name in model.live:
            flat = flat_view(model.live[storage.name].detach())
        if is_marked_dtype(storage.dtype):
            Mark.REHEARSED.write(flat)
        tensors[storage.name] = storage.create(flat)
    try:
        with model.as_loaded(group_name, tensors):
            model.restore_constants(derivation.reached)
            model.process(derivation)
            held = held_by_all(model.modules, derivation.reached)
            made = held.owned(derivation.known)
            problems = derivation.misfits(made) or derivation.strays(made, held.numbers)
            problems = problems or _stale(derivation, made, {storage.key for storage in storages})
            if not problems:
                derivation.renew(made)
    except ReshardError:  # another rank's
        raise
    except Exception as error:  # vLLM's, of any kind: its message goes into one report with the others
        model.gate.abandon()
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
