"""Fingerprint of a model's structure: by what it may compute otherwise than at the last comparison.

    made           with the layout, at set-up
    moved          in every switch: tensors that are not where the layout has them, by name
    differences    on the way to INFER: everything else by which the function may have changed
    magnitudes     after training: of tensors whose growth may show what one side ignores
    renew          after a comparison of log-probabilities has passed

Other weights are not read, so values that training changes make no difference. Compared are, by the
qualified name of a module: its class, the `forward` that would run, attributes that are numbers,
flags, texts, functions or containers of these, those of its config, and forward hooks; and the
contents of tensors that no switch sends, such as rotary frequencies. Not seen are changed variables
of a closure, and replaced functions of a Python module or a registry: `check_compute: always`
compares what they compute.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.errors import ReshardError, clipped
from hybrid_engine.ranks.digests import box_digests
from hybrid_engine.ranks.torch_internals import TensorDict

NUM_NAMED = 4
"""Maximum number of tensors or differences in a message."""

_NOT_COMPUTED = frozenset(
    {
        # Only gradients depend on these.
        "training",
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
        "padding_idx",
        # Compared by the shapes of tensors.
        "vocab_size",
        # Compared by rotary frequencies.
        "max_seq_len_cached",
        "original_max_seq_len",
        # transformers writes the dtype of each copy that it builds into their common config.
        "dtype",
        # Comparisons compute without a cache, and eagerly.
        "use_cache",
        "_compiled_call_impl",
        # Positions of images in the last forward pass, for generation.
        "rope_deltas",
        # Compared once, not for each module that refers to it.
        "config",
        # Trainers of other libraries note here what they have warned of.
        "warnings_issued",
    }
)
"""Attributes of modules that do not change the log-probabilities of given tokens."""

_NOT_COMPUTED_PARTS = ("drop", "jitter", "loss")
"""Parts of the names of attributes that only training uses."""

_OTHER_HOOKS = ("hybrid_engine.", "megatron.core.distributed.")
"""Modules whose forward hooks change no output: guards of state, and gathers of parameters."""

_HOOKS_BY_NAME = frozenset({"make_inputs_require_grads"})
"""Hooks of transformers for gradients of checkpointed layers."""

_MAX_NUMEL = 1 << 14
"""Maximum elements of a tensor whose growth is watched; routers' biases have one per expert."""

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = frozenset({bool, int, float, str, torch.dtype, type(None)})

_Node = tuple[str, torch.nn.Module, tuple[tuple[str, torch.nn.Module | None], ...]]
"""Qualified name of a module, the module, and its children when the tree was walked."""

_REMEDY = (
    "Shard and extend the model before the engine is built; offload through the engine, not by "
    ".data or .to(); or build a new engine"
)


@functools.cache
def is_computed_with(name: str) -> bool:
    """Return whether the log-probabilities may depend on a module's attribute of this name."""
    return name not in _NOT_COMPUTED and not any(part in name for part in _NOT_COMPUTED_PARTS)


class Fingerprint:
    """Structure of a model on this rank; see the module's docstring.

    Args:
        models: roots of the model, such as the chunks of a pipeline stage.
        part_of: returns the tensor whose storage holds this rank's part of a parameter or buffer.
        ignored: names of attributes and tensors that training changes.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        part_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        ignored: Collection[str] = (),
    ) -> None:
        self._models = models
        self._part_of = part_of
        self._ignored = _OF_EVERY_MODULE.union(ignored)
        self._tree: list[_Node] = []
        self._compared: dict[tuple[str, ...], list[str]] = {}
        # Aliases, because the address of a storage that was offloaded may change.
        self._placed = {name: part_of(tensor).detach() for name, tensor in self._stored()}
        self.renew()

    def renew(self) -> None:
        """Compare with the present structure from now on; tensors stay where they were made."""
        self._seen, self._contents = self._snapshot()

    @torch.no_grad()
    def magnitudes(self) -> dict[str, float]:
        """Return the largest absolute value of small persistent tensors that no gradient trains.

        Such as routers' biases, which are buffers or parameters, zero at first, and grow without a
        gradient. A side that ignores one computes nearly the same until it has grown. All are read,
        because writes through `.data` change no version. Parameters must be on the device, which is
        awaited once.
        """
        parts = {
            name: part
            for name, tensor in self._stored()
            if not tensor.requires_grad
            and not tensor.is_meta
            # Elements of quantised weights have one byte.
            and (part := self._part_of(tensor)).is_floating_point()
            and part.itemsize > 1
            and 0 < part.numel() <= _MAX_NUMEL
        }
        if not parts:
            return {}
        largest = torch.stack([torch.linalg.vector_norm(part, math.inf) for part in parts.values()])
        return dict(zip(parts, largest.tolist(), strict=True))

    def require_placed(self) -> None:
        """Raise ReshardError if a tensor moved, vanished, or has another name."""
        if moved := self.moved():
            raise ReshardError(
                f"{len(moved)} parameters moved, were added or were removed since the layout was "
                f"made, first {', '.join(moved[:NUM_NAMED])}. {_REMEDY}",
                code="parameters-moved",
            )

    def moved(self) -> list[str]:
        """Return the names of parameters and persistent buffers that the layout does not describe.

        Gathered parameters must have been freed.
        """
        missing = dict(self._placed)
        names = []
        for name, tensor in self._stored():
            alias = missing.pop(name, None)
            part = self._part_of(tensor)
            # The same storage, offset, shape and strides.
            if alias is None or alias.dtype is not part.dtype or not alias.is_set_to(part):
                names.append(name)
        return [*names, *missing]

    def differences(self) -> list[str]:
        """Describe everything by which the function may have changed; waits for the device once."""
        before = self._seen
        after, contents = self._snapshot()
        texts = []
        for name in before | after:
            old, new = before.get(name, {}), after.get(name, {})
            if old == new:
                continue
            for key in old | new:
                if old.get(key) != new.get(key):
                    now, then = (clipped(str(side.get(key)), 80) for side in (new, old))
                    texts.append(f"{key} of {name or 'the model'} is {now}, was {then}")
        for name, digest in contents.items():
            if self._contents.get(name, digest) != digest:
                texts.append(f"{name} has other values")
        return texts

    def _nodes(self) -> list[_Node]:
        """Return all modules, in order, also under second names."""
        if not self._tree or any(
            tuple(vars(module)["_modules"].items()) != children
            for _, module, children in self._tree
        ):
            self._tree = [
                (name, module, tuple(vars(module)["_modules"].items()))
                for index, model in enumerate(self._models)
                for name, module in model.named_modules(
                    prefix=f"chunk{index}" if index else "", remove_duplicate=False
                )
            ]
        return self._tree

    def _stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (qualified name, tensor) of the parameters and persistent buffers."""
        for name, module, _ in self._nodes():
            attributes = vars(module)
            transient = attributes["_non_persistent_buffers_set"]
            for tensors in (attributes["_parameters"], attributes["_buffers"]):
                for key, tensor in tensors.items():
                    if tensor is not None and key not in transient:
                        yield f"{name}.{key}".lstrip("."), tensor

    def _snapshot(self) -> tuple[dict[str, dict[str, object]], Mapping[str, int]]:
        """Return the properties of modules and configs, and the digests of unsent tensors."""
        seen: dict[str, dict[str, object]] = {}
        unsent: TensorDict = {}
        configs = set()
        for name, module, _ in self._nodes():
            kind: Any = type(module)
            attributes = vars(module)
            seen[name] = properties = self._properties(name, attributes, unsent)
            properties["forward of the class"] = (kind, kind.forward)
            if transient := attributes["_non_persistent_buffers_set"] - self._ignored:
                buffers = attributes["_buffers"]
                self._properties(name, {key: buffers.get(key) for key in transient}, unsent)
            for key in ("_forward_pre_hooks", "_forward_hooks"):
                # None if there are none.
                properties[key] = [*filter(_may_change, attributes[key].values())] or None
            config = attributes.get("config")
            if id(config) not in configs and hasattr(config, "__dict__"):
                configs.add(id(config))
                where = f"{name}.config".lstrip(".")
                seen[where] = self._properties(where, vars(config), unsent)
        return seen, dict(zip(unsent, box_digests(unsent.values()), strict=True))

    def _properties(
        self,
        owner: str,
        attributes: Mapping[str, object],
        tensors: TensorDict,
    ) -> dict[str, object]:
        """Return the compared attributes of a module or config, and add tensors to `tensors`."""
        names = tuple(attributes)
        compared = self._compared.get(names)
        if compared is None:
            # Thousands of modules have a dozen different sets of attributes.
            compared = [name for name in names if name not in self._ignored]
            self._compared[names] = compared = [*filter(is_computed_with, compared)]
        properties = {name: attributes[name] for name in compared}
        if not _PLAIN.issuperset(map(type, properties.values())):
            for name, value in properties.items():
                if type(value) not in _PLAIN:
                    properties[name] = summary_of(value)
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        tensors[f"{owner}.{name}"] = value
        return properties


def settings_of(module: torch.nn.Module) -> dict[str, object]:
    """Return the numbers, flags and texts that a module computes with."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and not name.startswith("_")
        and is_computed_with(name)
    }


def summary_of(value: object) -> object:
    """Return an attribute's value in a form that can be compared with a later one."""
    if isinstance(value, dict):
        return [(summary_of(key), summary_of(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(summary_of, value)]
    if isinstance(value, functools.partial):
        return [value.func, summary_of(value.args), summary_of(value.keywords)]
    # Other objects and tensors are kept of a forward pass, or are state of the training loop, such
    # as timers. They come and go, so they count as None.
    return value if type(value) in _PLAIN or callable(value) else None


def _may_change(hook: Any) -> bool:
    """Return whether a forward hook may change an output."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    is_known = getattr(function, "__name__", "") in _HOOKS_BY_NAME
    return not is_known and not str(getattr(function, "__module__", "")).startswith(_OTHER_HOOKS)
