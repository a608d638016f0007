"""What of the training state is still on the device after an offload, and what of it no inventory lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hybrid_engine.memory.offload_items import Reached, Storage, Survey, storage_of

logger = logging.getLogger("hybrid_engine")

UNACCOUNTED = "unaccounted: "
"""Prefix of the owner of a tensor that no inventory lists."""

_TOLERATED = 0.01  # of the training bytes may be unaccounted for without a warning


class Residual:
    """Compares what model and optimizer refer to with what the inventory lists.

    Args:
        reachable: everything that model and optimizer refer to.
        device_type: only tensors there count.
    """

    def __init__(self, reachable: Callable[[], Iterable[Reached]], device_type: str) -> None:
        self._reachable = reachable
        self._device_type = device_type
        self._checked_owners: set[str] = set()  # of all storages when `warn` last looked

    def by_owner(self, found: Survey) -> dict[str, int]:
        """Return the bytes on the device: of the inventory `found`, of what is known to stay, and the unaccounted."""
        residual: dict[str, int] = {}
        for by_owner in found.resident_nbytes().values():
            residual.update({owner: nbytes for owner, nbytes in by_owner.items() if nbytes})
        for reached, nbytes in self._outside(found.keys()):
            owner = reached.owner if reached.stays else f"{UNACCOUNTED}{reached.owner}"
            residual[owner] = residual.get(owner, 0) + nbytes
        return residual

    def warn(self, storages: Iterable[Storage], offloaded: Iterable[Storage], listed: set[int]) -> None:
        """Log what is unaccounted for if it is more than a trifle; once for every set of owners.

        Args:
            storages: the inventory.
            offloaded: what is off the device, perhaps from an earlier inventory.
            listed: keys of all that the inventory lists, caches included.
        """
        owners = {storage.owner for storage in storages}
        if owners <= self._checked_owners:
            return
        self._checked_owners |= owners
        total = sum({storage.key: storage.nbytes for storage in (*storages, *offloaded)}.values())
        unknown = {reached.owner: nbytes for reached, nbytes in self._outside(listed) if reached.stays is None}
        if sum(unknown.values()) > _TOLERATED * total:
            largest = sorted(unknown, key=lambda owner: -unknown[owner])[:8]
            logger.warning(
                "%d bytes that model or optimizer refer to stay on the device: the inventory (%d bytes) does not list "
                "them. Largest: %s",
                sum(unknown.values()),
                total,
                ", ".join(f"{owner} ({unknown[owner]} bytes)" for owner in largest),
            )

    def _outside(self, listed: set[int]) -> list[tuple[Reached, int]]:
        """Return what is reachable beside these storages, each storage once, with its bytes on the device."""
        seen, outside = set(listed), []
        for reached in self._reachable():
            if reached.tensor.device.type != self._device_type:
                continue
            storage, key, buffer = storage_of(reached.owner, reached.tensor)
            nbytes = storage.nbytes() if buffer is None else buffer.resident_nbytes()
            if key not in seen and nbytes:
                seen.add(key)
                outside.append((reached, nbytes))
        return outside
