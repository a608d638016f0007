"""Prefetch of training state before the switch, while a rollout's last sequences are generated.

    kinds     those needed by the state that followed the last rollout: parameters first, then
              optimizer state. Gradients are not prefetched: they come back as zeros, so there is no
              copy to save
    amount    as much as stays within the highest peak so far, or prefetch_mb; on CUDA at most the
              free memory

Each rank starts when its replica is nearly done; nothing here is collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import OffloadError
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.memory.offload_items import Kind
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.switch.states import NEEDED_KINDS, State

logger = logging.getLogger("hybrid_engine")

_COPIED: tuple[Kind, ...] = ("param", "optimizer")


class Prefetcher:
    """Onloads training state during rollouts, on one rank.

    Args:
        offloader: offloader of the trainer's state.
        inference: inference weights that share the device.
        config: sets the amount (`prefetch_mb`, `gpu_memory_utilization`).
        device: this rank's device.
        taken_before: bytes of the device that were in use when vLLM was built.

    Attributes:
        nbytes: bytes prefetched since the last switch.
        peak: bytes of training and inference state on the device after the last prefetch.
    """

    def __init__(
        self,
        offloader: Offloader,
        inference: InferenceWeights,
        config: GenerateConfig,
        device: torch.device,
        taken_before: int = 0,
    ) -> None:
        self._offloader = offloader
        self._inference = inference
        self._config = config
        self._device = device
        # Bytes of CUDA contexts, communicators and other memory that is never offloaded.
        self._overhead = taken_before - resident_nbytes(offloader)
        self._highest_peak = 0
        # FORWARD needs the least of all states that train, so the first guess prefetches nothing in
        # vain.
        self._next_state = State.FORWARD
        self.nbytes = 0
        self.peak = 0

    def switched(self, before: State, target: State, peak: int) -> None:
        """Record a switch and its peak in bytes; its report counts the prefetched bytes."""
        if before is State.INFER:
            self._next_state = target
        self._highest_peak = max(self._highest_peak, peak)

    def reset(self) -> None:
        """Reset the counts, before a switch."""
        self.nbytes = 0
        self.peak = 0

    def begin(self) -> None:
        """Onload the kinds that the next state will need, as far as they fit.

        Logs an OffloadError instead of raising it: the next switch brings the rest.
        """
        needed = NEEDED_KINDS[self._next_state]
        away = self._offloader.away_nbytes(kind for kind in _COPIED if kind in needed)
        wanted = [kind for kind, nbytes in away.items() if nbytes]
        if not wanted:
            return
        self._offloader.wait()  # copies in flight must count as resident in `_room`
        room = self._room()
        if room <= 0:
            return
        before = self.nbytes
        try:
            self.bring(wanted, room)
        except OffloadError as error:
            logger.warning("[Reshard] prefetch failed, the next switch brings the rest: %s", error)
        started = self.nbytes - before
        total = sum(away.values())
        logger.debug("[Reshard] prefetch: %d of %d bytes are on their way", started, total)

    def bring(self, kinds: Iterable[Kind], limit: int | None = None) -> None:
        """Onload these kinds, at most `limit` bytes. Raises OffloadError; no state is lost."""
        held = self._held_nbytes()
        away = sum(self._offloader.away_nbytes().values())
        try:
            self._offloader.onload(kinds, read_only=True, wait=False, limit=limit)
        finally:
            # Also after an error: part of the state may have been onloaded.
            onloaded = away - sum(self._offloader.away_nbytes().values())
            self.nbytes += onloaded
            self.peak = held + onloaded

    def _room(self) -> int:
        """Return the bytes that may be onloaded now."""
        configured = self._config.prefetch_mb
        if configured is None:
            room = self._highest_peak - self._held_nbytes()
        else:
            room = configured * MIB - self.nbytes
        if self._device.type == "cuda":
            free, size = torch.cuda.mem_get_info(self._device)
            taken = self._overhead + resident_nbytes(self._offloader)
            utilization = self._config.gpu_memory_utilization
            room = min(room, free_beside_vllm(free, size, utilization, taken))
        return room

    def _held_nbytes(self) -> int:
        return resident_nbytes(self._offloader) + self._inference.resident_nbytes()


def free_beside_vllm(free: int, size: int, utilization: float, taken: int) -> int:
    """Return the free bytes of a device that vLLM will not allocate.

    vLLM may still grow to its full share of the device, `utilization * size`.

    Args:
        free: free bytes of the device.
        size: total bytes of the device.
        utilization: vLLM's share, from 0 to 1.
        taken: bytes in use by anything but vLLM.
    """
    return min(free, int(size * (1 - utilization)) - taken)


def resident_nbytes(offloader: Offloader) -> int:
    """Return the bytes of training state on the device."""
    return sum(sum(by_owner.values()) for by_owner in offloader.resident_nbytes().values())
