"""Search for all tensors that Megatron's objects refer to, to find those an offload forgot."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.memory.offload_items import OffloadItem, storage_of, survey
from hybrid_engine.ranks.torch_internals import wrapped_tensors
from megatron_patches.buffers import data_of
from megatron_patches.optimizers import gradient_of

SMALL = 1024**2
"""Largest size in bytes of an unlisted tensor of known purpose that may stay on the device."""
UNACCOUNTED = "unaccounted: "
"""Prefix of the owner of an unlisted tensor."""

_CONSTANTS = {
    "sort_input_by_local_experts",
    "restore_output_by_local_experts",
}  # Attributes of a token dispatcher.
_WALKED = (
    "megatron",
    "megatron_patches",
    "hybrid_engine",
    "transformer_engine",
    "apex",
    "torch.nn",
    "torch.optim",
)
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """A tensor found by the search.

    Attributes:
        owner: path that leads to the tensor.
        stays: reason for which it may stay on the device; None if it may not.
    """

    owner: str
    tensor: torch.Tensor
    stays: str | None = None


def reachable(**roots: Any) -> Iterator[Reached]:
    """Yield every tensor that `roots` reach through attributes and containers."""
    walk = _Walk()
    for path, root in roots.items():
        yield from walk.through(path, root)


def residual(items: Iterable[OffloadItem], reached: Iterable[Reached]) -> dict[str, int]:
    """Return bytes on the device (here "cpu"): of all items and, by owner, of other tensors."""
    listed = survey(items, "cpu")
    resident = Counter(items=sum(listed.resident_nbytes().values()))
    seen = {item.key for item in listed.storages} | {
        storage_of(item.owner, item.tensor)[1] for item in listed.caches
    }
    for reach in reached:
        storage, key, buffer = storage_of(reach.owner, reach.tensor)
        nbytes = storage.nbytes() if buffer is None else buffer.resident_nbytes()
        if reach.tensor.device.type == "cpu" and key not in seen and nbytes:
            seen.add(key)
            owner = reach.owner if reach.stays else f"{UNACCOUNTED}{reach.owner}"
            resident[owner] += nbytes
    return resident


class _Walk:
    """Walk over objects of the packages in _WALKED that visits each object once."""

    def __init__(self) -> None:
        # By id. Holds the objects, because Python reuses the id of a freed object.
        self._seen: dict[int, Any] = {}

    def through(self, path: str, root: Any) -> Iterator[Reached]:
        """Yield the tensors below `root`, each with the first path found."""
        # A stack in place of recursion, which would exceed Python's limit.
        pending: list[tuple[str, Any, str | None]] = [(path, root, None)]
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
            pending += reversed(
                [(f"{path}{step}", child, reason) for step, child, reason in _below(value)]
            )


def _below(value: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Yield an object's references: (path step, object, why a tensor may stay on the device)."""
    if isinstance(value, torch.Tensor):
        if (gradient := gradient_of(value)) is not None:
            yield ".grad", gradient, None
        yield from ((f".{name}", child, None) for name, child in vars(value).items())
    elif isinstance(value, Mapping):
        yield from (
            (f"[{_label(key)}]", child, _why_stays(key, child)) for key, child in value.items()
        )
        yield from (("'s key", key, None) for key in value if isinstance(key, torch.Tensor))
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{index}]", child, None) for index, child in enumerate(value))
    elif isinstance(value, torch.nn.Module):
        yield from (
            (f".{name}", child, None) for name, child in value.named_parameters(recurse=False)
        )
        yield from (
            (f".{name}", child, "a module's buffer")
            for name, child in value.named_buffers(recurse=False)
        )
        yield from ((f".{name}", child, None) for name, child in value.named_children())
        yield from _attributes(value)
    elif type(value).__module__.startswith(_WALKED):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any, str | None]]:
    for name, child in getattr(value, "__dict__", {}).items():
        yield f".{name}", child, _why_stays(name, child)


def _why_stays(name: Any, value: Any) -> str | None:
    """Return why a tensor may stay on the device: a known small tensor, or a scalar."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(name, str) and "inv_freq" in name:
        return "rotary frequencies"
    if name in _CONSTANTS:
        return "order of experts"
    return "a scalar" if value.numel() == 1 else None


def _label(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else repr(key)[:40]
