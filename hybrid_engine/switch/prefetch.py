"""Training state that comes back ahead of the switch, while the last sequences of a rollout are drawn.

    what        the kinds that the state after the last rollout needed: parameters first, then optimizer state.
                Gradients stay away: they come back as zeros, and no copy is saved
    how much    what keeps everything within the highest peak so far, or prefetch_mb; on CUDA no more than is free

Each rank begins when its own replica is nearly done; nothing here is collective.
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
    """Brings training state back during rollouts, on one rank.

    Args:
        offloader: of the trainer's state.
        inference: the weights beside which it comes.
        config: how much may come.
        device: of this rank.
        taken_before: bytes of the device that were taken when vLLM was built.

    Attributes:
        nbytes: brought since the last switch.
        peak: bytes of training and inference state that are on the device with them.
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
        self._beside = taken_before - resident_nbytes(offloader)  # contexts, communicators, what never leaves
        self._highest_peak = 0
        self._next_state = State.FORWARD  # needs no more than any other that trains
        self.nbytes = self.peak = 0

    def switched(self, before: State, target: State, peak: int) -> None:
        """Note a switch and its peak in bytes; what was brought is in its report."""
        if before is State.INFER:
            self._next_state = target
        self._highest_peak = max(self._highest_peak, peak)

    def reset(self) -> None:
        """Begin to count anew: a switch follows."""
        self.nbytes = self.peak = 0

    def begin(self) -> None:
        """Bring what the next state is going to need, as much as fits. What fails is left to the switch, and logged."""
        away = self._offloader.away_nbytes(kind for kind in _COPIED if kind in NEEDED_KINDS[self._next_state])
        wanted = [kind for kind, nbytes in away.items() if nbytes]
        if not wanted:
            return
        self._offloader.wait()  # what is on its way already is held from here on
        if (room := self._room()) <= 0:
            return
        before = self.nbytes
        try:
            self.bring(wanted, room)
        except OffloadError as error:
            logger.warning("[Reshard] prefetch failed, the next switch brings the rest: %s", error)
        logger.debug("[Reshard] prefetch: %d of %d bytes are on their way", self.nbytes - before, sum(away.values()))

    def bring(self, kinds: Iterable[Kind], limit: int | None = None) -> None:
        """Bring these kinds, at most `limit` bytes. Raises OffloadError; nothing is lost."""
        held, away = self._held(), sum(self._offloader.away_nbytes().values())
        try:
            self._offloader.onload(kinds, read_only=True, wait=False, limit=limit)
        finally:
            came = away - sum(self._offloader.away_nbytes().values())
            self.nbytes += came
            self.peak = held + came

    def _room(self) -> int:
        """Bytes that may come now."""
        configured = self._config.prefetch_mb
        room = self._highest_peak - self._held() if configured is None else configured * MIB - self.nbytes
        if self._device.type == "cuda":
            free, size = torch.cuda.mem_get_info(self._device)
            taken = self._beside + resident_nbytes(self._offloader)
            room = min(room, free_beside_vllm(free, size, self._config.gpu_memory_utilization, taken))
        return room

    def _held(self) -> int:
        return resident_nbytes(self._offloader) + self._inference.resident_nbytes()


def free_beside_vllm(free: int, size: int, utilization: float, taken: int) -> int:
    """Bytes of a device that vLLM will not take: of those that are free now, less what is left of vLLM's share.

    Of its share vLLM may take all, beside the `taken` bytes that others have.
    """
    return min(free, int(size * (1 - utilization)) - taken)


def resident_nbytes(offloader: Offloader) -> int:
    """Bytes of training state on the device."""
    return sum(nbytes for by_owner in offloader.resident_nbytes().values() for nbytes in by_owner.values())
