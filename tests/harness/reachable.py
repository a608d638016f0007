"""Every tensor to which Megatron's objects refer, to tell whether anything was forgotten when they are offloaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.memory.offload_items import OffloadItem, storage_of, survey
from hybrid_engine.ranks.torch_internals import wrapped_tensors
from megatron_patches.buffers import data_of
from megatron_patches.optimizers import gradient_of

SMALL = 1024**2
"""Bytes up to which a tensor that no item lists, but whose purpose is known, is left on the device."""
UNACCOUNTED = "unaccounted: "
"""Prefix of the owner of a tensor that no item lists."""

_CONSTANTS = {"sort_input_by_local_experts", "restore_output_by_local_experts"}  # of a token dispatcher
_WALKED = ("megatron", "megatron_patches", "hybrid_engine", "transformer_engine", "apex", "torch.nn", "torch.optim")
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """A tensor, the path that leads to it, and why it is left on the device on purpose, if there is a reason."""

    owner: str
    tensor: torch.Tensor
    stays: str | None = None


def reachable(**roots: Any) -> Iterator[Reached]:
    """Parameters, buffers, gradients, main params, optimizer state, and whatever else is an attribute of these objects
    or lies in a list, a tuple, a set or a dict that is."""
    walk = _Walk()
    for path, root in roots.items():
        yield from walk.through(path, root)


def residual(items: Iterable[OffloadItem], reached: Iterable[Reached]) -> dict[str, int]:
    """Bytes that are not in host memory, by owner: of the items, of what stays on purpose, and the unaccounted."""
    listed = survey(items, "cpu")
    found = {owner: n for owners in listed.resident_nbytes().values() for owner, n in owners.items() if n}
    seen = {one.key for one in listed.storages} | {storage_of(one.owner, one.tensor)[1] for one in listed.caches}
    for each in reached:
        storage, key, buffer = storage_of(each.owner, each.tensor)
        nbytes = storage.nbytes() if buffer is None else buffer.resident_nbytes()
        if each.tensor.device.type == "cpu" and key not in seen and nbytes:
            seen.add(key)
            owner = each.owner if each.stays else f"{UNACCOUNTED}{each.owner}"
            found[owner] = found.get(owner, 0) + nbytes
    return found


class _Walk:
    """Goes through objects of the packages in _WALKED, each once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id, and alive as long as this is: an id would be used again

    def through(self, path: str, root: Any) -> Iterator[Reached]:
        """Tensors below `root`, with the first path found to each."""
        pending: list[tuple[str, Any, str | None]] = [(path, root, None)]  # no recursion, which long lists would end
        while pending:
            path, value, stays = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                if wrapped := wrapped_tensors(value):
                    pending += [(f"{path}.{name}", inner, stays) for name, inner in wrapped.items()]
                elif (held := data_of(value)) is not value:
                    pending.append((f"{path}'s data", held, stays))
                else:
                    yield Reached(path, value, stays if value.nbytes <= SMALL else None)
            pending += reversed([(f"{path}{step}", found, why) for step, found, why in _below(value)])


def _below(value: Any) -> Iterator[tuple[str, Any, str | None]]:
    """What an object refers to: (step of the path, object, why it stays on the device if it is a tensor)."""
    if isinstance(value, torch.Tensor):
        if (gradient := gradient_of(value)) is not None:
            yield ".grad", gradient, None
        yield from ((f".{name}", found, None) for name, found in vars(value).items())
    elif isinstance(value, Mapping):
        yield from ((f"[{_label(key)}]", found, _why_stays(key, found)) for key, found in value.items())
        yield from (("'s key", key, None) for key in value if isinstance(key, torch.Tensor))
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{index}]", found, None) for index, found in enumerate(value))
    elif isinstance(value, torch.nn.Module):
        yield from ((f".{name}", found, None) for name, found in value.named_parameters(recurse=False))
        yield from ((f".{name}", found, "a module's buffer") for name, found in value.named_buffers(recurse=False))
        yield from ((f".{name}", found, None) for name, found in value.named_children())
        yield from _attributes(value)
    elif type(value).__module__.startswith(_WALKED):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any, str | None]]:
    for name, found in getattr(value, "__dict__", {}).items():
        yield f".{name}", found, _why_stays(name, found)


def _why_stays(name: Any, value: Any) -> str | None:
    """Small things that belong to a module or an optimizer by name, and numbers."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(name, str) and "inv_freq" in name:
        return "rotary frequencies"
    if name in _CONSTANTS:
        return "order of experts"
    return "a number" if value.numel() == 1 else None


def _label(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else repr(key)[:40]
