"""State that layers make in a forward, and its reset before new weights arrive.

    state = ForwardState.of(...)    once vLLM has processed the weights, before any forward
    ... forwards ...                a layer merges, casts or transposes weights at its first call
                                    and caches the result
    state.forget()                  before new weights: restores the contents before any forward

Such state is outside of post-load processing and of the parameters that a switch fills, so a cached
tensor would stay that of the first weights. A container is the attributes of a module, a kernel or
an attention implementation, a list, or a dict. If a forward made or wrote a tensor in a container,
the container gets its former entries back, flags included, and so do the containers around it.
State that forwards leave in other containers stays. Captured graphs go on computing with the
tensors of the capture, so with graphs such a tensor is an error, unless it is a global of one of
vLLM's modules: a workspace that layers share.

KV caches are bound after loading and stay, and so do wrapped methods and captures of experts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hybrid_engine.backends.vllm.weights.derivation import MISSING, Change, TableCopy
from hybrid_engine.backends.vllm.weights.groups import Names
from hybrid_engine.backends.vllm.weights.postload import (
    ModuleTensors,
    Table,
    display,
    module_tensors,
    reached_from,
)
from hybrid_engine.backends.vllm.weights.tracing import NamedModules, storage_key
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.ranks.torch_internals import num_writes

_KV_CACHE = "kv_cache"
"""Attribute in which each vLLM layer with a KV cache keeps it once it is bound."""
_SET_LATER = frozenset({_KV_CACHE, "quant_method", "capture_fn", "routing_sink"})
"""Attributes that vLLM sets between loading and forwards: it binds caches, may wrap methods, and
captures the experts of tokens (`generate_config.router_replay`)."""
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Container(TableCopy):
    """A container that a module reaches, and its former contents.

    Attributes:
        renewed: keys of entries that each commit of weights replaces; the key None stands for a
            list as a whole (`Change`).
    """

    renewed: Collection[object]

    @staticmethod
    def of(path: str, table: Table, renewed: Collection[object]) -> _Container:
        entries = table.copy()
        if isinstance(entries, dict):
            for key in renewed:
                entries.pop(key, None)  # the copy would keep the present value alive
        return _Container(path, table, entries, renewed)

    def written(self) -> Iterator[Change]:
        for change in self.changes(_differs):
            if change.key not in self.renewed:
                yield change


def _differs(before: object, now: object) -> bool:
    # Identity first: most of the thousands of entries in a switch have not changed.
    if now is before:
        return False
    # The types matter, because 1 == 1.0 == True.
    return type(now) is not type(before) or not isinstance(now, _SCALARS) or now != before


@dataclass
class _WatchedTensor:
    """A tensor that is not a weight, with evidence of writes to it.

    Both measures are needed. The profiling forward computes with weights of zero and may write the
    bytes that are there already, so writes count. A kernel that bypasses torch changes only the
    digest.
    """

    tensor: torch.Tensor
    num_writes: int
    digest: int


@dataclass(frozen=True)
class _Untouched:
    """A module before its first forward.

    Attributes:
        constants: path -> tensor that is not a weight.
    """

    module: torch.nn.Module
    containers: tuple[_Container, ...]
    constants: Mapping[str, _WatchedTensor]


@dataclass(frozen=True)
class _ForwardChanges:
    """Changes that forwards made in one module.

    Attributes:
        computed: path -> entry with a new tensor or float.
        written: paths of tensors that were written in place.
        changes: all changed entries in containers around any of these.
    """

    module: torch.nn.Module
    computed: Mapping[str, Change]
    written: Names
    changes: tuple[Change, ...]

    def undo(self) -> None:
        """Restore all former entries, and remove new ones from containers with a computed tensor.

        vLLM may have added entries to other containers outside of forwards; those stay.
        """
        owners = {id(change.table) for change in self.computed.values()}
        if self.written:
            # A written tensor belongs to its module.
            owners.add(id(vars(self.module)))
        for change in self.changes:
            if change.loaded is not MISSING or id(change.table) in owners:
                change.put(change.loaded)

    def captured(self, known: Collection[int]) -> list[str]:
        """Return the paths of tensors that graphs may have captured.

        These are tensors made outside of the storages `known`, and tensors written only once: a
        changed flag shows that.
        """
        paths = [
            path
            for path, change in self.computed.items()
            if reached_from(change.current(), path).outside(known)
        ]
        # A flag that changed with it shows that a tensor is written in the first forward only.
        has_flags = any(
            isinstance(change.loaded, _SCALARS) and isinstance(change.current(), _SCALARS)
            for change in self.changes
        )
        return paths + list(self.written if has_flags else ())


@dataclass(frozen=True)
class ForwardState:
    """Contents of a model's modules before their first forward.

    Attributes:
        known: keys of the storages of weights, of tensors derived from weights, and of tensors that
            existed before any forward.
        has_graphs: whether vLLM captures graphs.
    """

    known: frozenset[int] = frozenset()
    has_graphs: bool = False
    _modules: Mapping[str, _Untouched] = field(default_factory=dict)

    @staticmethod
    def of(
        modules: NamedModules,
        renewed: Iterable[Change],
        weights: Collection[int],
        has_graphs: bool,
    ) -> ForwardState:
        """Record the contents of modules that no forward has touched.

        Args:
            modules: modules by name, without tensors that commits make of weights again.
            renewed: entries that commits replace.
            weights: keys of storages whose bytes commits change.
            has_graphs: whether vLLM captures graphs.
        """
        # Entries that commits or vLLM itself replace later must not be rolled back.
        keys: dict[int, set[object]] = {}
        for change in renewed:
            keys.setdefault(id(change.table), set(_SET_LATER)).add(change.key)
        known = set(weights)
        untouched = {}
        for name, module in modules.items():
            contents = module_tensors(modules, [name])
            containers = tuple(
                _Container.of(path, table, keys.get(id(table), _SET_LATER))
                for path, table in contents.tables.items()
            )
            tensors = {
                path: tensor.detach()
                for path, tensor in contents.outside(weights).items()
                if not tensor.is_meta
            }
            known |= {storage_key(tensor) for tensor in tensors.values()}
            digests = box_digests(tensors.values())
            constants = {
                path: _WatchedTensor(tensor, num_writes(tensor), digest)
                for (path, tensor), digest in zip(tensors.items(), digests, strict=True)
            }
            untouched[name] = _Untouched(module, containers, constants)
        return ForwardState(frozenset(known), has_graphs, untouched)

    def joined(self, other: ForwardState, names: Collection[str]) -> ForwardState:
        """Return the contents of this model's modules, and of modules `names` of another one."""
        modules = {name: other._modules[name] for name in names}
        known = self.known | other.known
        return ForwardState(known, self.has_graphs, {**self._modules, **modules})

    def disregard_commits(self) -> None:
        """Take the writes so far as those of commits: vLLM's processing may write a constant again.

        Call after commits, while no forward has run since `forget`.
        """
        for module in self._modules.values():
            for constant in module.constants.values():
                constant.num_writes = num_writes(constant.tensor)

    def forget(self) -> list[str]:
        """Restore the contents of all modules; return descriptions of state that cannot be reset.

        If there is any such state, nothing is restored.
        """
        # Caches are bound after `of`.
        known = self.known | self._kv_caches()
        # For all modules together, because the digests synchronise with the device.
        written = _written(self._modules.values())
        modules = (_forward_changes(module, known, written) for module in self._modules.values())
        changed = [module for module in modules if module.computed or module.written]
        faults = []
        if changed and self.has_graphs:
            shared = known | _globals_of_vllm()
            faults = [
                f"{display(path)} ({type(changes.module).__name__}) was made in a forward, and "
                "captured graphs would go on computing with it. Set generate_config.enforce_eager "
                "to true"
                for changes in changed
                for path in changes.captured(shared)
            ]
        if not faults:
            for changes in changed:
                changes.undo()
        return faults

    def _kv_caches(self) -> frozenset[int]:
        """Return the keys of KV cache storages: views of a cache are not state of a forward."""
        keys: set[int] = set()
        for untouched in self._modules.values():
            cache = vars(untouched.module).get(_KV_CACHE)
            keys.update(map(storage_key, reached_from(cache, "").tensors.values()))
        return frozenset(keys)


def _globals_of_vllm() -> frozenset[int]:
    """Return the keys of storages of tensors that are globals of vLLM's modules.

    Tensors inside global lists and dicts are left out: these may be caches of tensors that layers
    made of weights.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    # Only direct values, no contents of containers.
    values = [value for module in modules for value in vars(module).values()]
    return frozenset(storage_key(value) for value in values if isinstance(value, torch.Tensor))


def _written(modules: Iterable[_Untouched]) -> set[int]:
    """Return the ids of constants that were written; synchronises with the device once."""
    constants = [constant for module in modules for constant in module.constants.values()]
    digests = box_digests(constant.tensor for constant in constants)
    return {
        # Either measure alone is enough: a write of equal bytes, or bytes that changed without a
        # counted write.
        id(constant)
        for constant, digest in zip(constants, digests, strict=True)
        if (num_writes(constant.tensor), digest) != (constant.num_writes, constant.digest)
    }


def _forward_changes(
    before: _Untouched,
    known: Collection[int],
    written_ids: Collection[int],
) -> _ForwardChanges:
    """Return the changes that forwards made in a module.

    Tensors in storages `known` are left out: a view of weights follows the weights.
    """
    computed: dict[str, Change] = {}
    changes: list[tuple[str, Change]] = []
    for container in before.containers:
        for change in container.written():
            changes.append((container.path, change))
            is_list = change.key is None
            path = container.path if is_list else f"{container.path}.{change.key}"
            present = reached_from(change.current(), path)
            if _is_computed(present, change.loaded, known):
                computed[path] = change
    written = tuple(
        path for path, constant in before.constants.items() if id(constant) in written_ids
    )
    paths = [*computed, *written]
    # The next character must begin a step: `layers.10` is not inside `layers.1`.
    around = tuple(
        change
        for outer, change in changes
        if any(path.startswith(outer) and path[len(outer) :][:1] in ("", *".[(") for path in paths)
    )
    return _ForwardChanges(before.module, computed, written, around)


def _is_computed(present: ModuleTensors, before: object, known: Collection[int]) -> bool:
    """Return whether a changed entry may depend on weights.

    True if it has a float or a tensor outside of the storages `known`, or had a tensor before.
    """
    has_floats = any(isinstance(number, float) for number in present.numbers.values())
    return has_floats or bool(present.outside(known)) or isinstance(before, torch.Tensor)
