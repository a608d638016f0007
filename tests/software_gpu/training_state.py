"""Training state on the device as in Megatron: elastic parameters and gradients, plain Adam."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from unittest import mock

import torch

from hybrid_engine.memory import device_pages, offload_items
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import KINDS, Guards, OffloadItem, Part
from hybrid_engine.memory.offloader import Offloader

_NUM_CHUNKS = 1.2  # Of bfloat16 parameters, so that there are two chunks.
_PLAIN_NUMELS = (1_000, 400_000, 37_777)


class TrainingState:
    """Owner of the tensors, which also trains: it writes on a side stream and does not wait for it.

    Args:
        seed: seed of all values.
        chunk_nbytes: chunk size of the elastic memory; all sizes depend on it.

    Attributes:
        offloader: offloader of this state.
        guard: the offloader's record of offloaded tensors.
        kept: copies of parameters and optimizer state.
    """

    def __init__(self, seed: int, chunk_nbytes: int = device_pages.CHUNK_NBYTES) -> None:
        device = torch.device("cuda", 0)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.chunk_nbytes = chunk_nbytes
        self.numel = int(chunk_nbytes * _NUM_CHUNKS) // 2
        with mock.patch.object(device_pages, "CHUNK_NBYTES", chunk_nbytes):
            self._param = allocate_elastic(self.numel, torch.bfloat16, device, "param")
            self._grad = allocate_elastic(self.numel, torch.float32, device, "grad")
        self._adam = [torch.zeros(numel, device=device) for numel in _PLAIN_NUMELS]
        self._side = torch.cuda.Stream(device)
        self.guard = Guards()
        self.offloader = Offloader(self)
        self.kept: list[torch.Tensor] = []

    def offload_items(self) -> Iterable[OffloadItem]:
        yield OffloadItem("param", "param", self._param, "copy")
        yield OffloadItem("grad", "grad", self._grad, "drop")
        for number, tensor in enumerate(self._adam):
            yield OffloadItem(f"adam {number}", "optimizer", tensor, "copy")

    def train(self) -> None:
        """Write new values, the last ones on another stream, and return without a wait."""
        copied = [self._param, *self._adam]
        for tensor in (*copied, self._grad):
            tensor.normal_(generator=self._generator)
        on_host = torch.ones(_PLAIN_NUMELS[0], pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._adam[0].copy_(on_host, non_blocking=True)
        self.kept = [self._param.clone(), on_host, *(tensor.clone() for tensor in self._adam[1:])]

    def parts(self, generator: random.Random) -> list[Part]:
        """Return the parameters, split at positions that are no chunk boundaries."""
        cuts = [0, *sorted(generator.randrange(self.numel) for _ in range(4)), self.numel]
        return [Part(self._param, start, stop) for start, stop in itertools.pairwise(cuts)]

    def require_intact(self, *, has_dropped: bool = True) -> None:
        """Compare all values, and gradients with zeros if they were dropped. Raises
        AssertionError."""
        for tensor, kept in zip([self._param, *self._adam], self.kept, strict=True):
            assert torch.equal(tensor.cpu(), kept.cpu())
        assert not (has_dropped and self._grad.any()), "dropped gradients must be restored as zeros"


Way = Callable[[TrainingState, random.Random], None]


def _parts(state: TrainingState, generator: random.Random) -> None:
    for part in state.parts(generator):
        state.offloader.offload_parts("param", [part])


def _saved_parts(state: TrainingState, generator: random.Random) -> None:
    for part in state.parts(generator):
        state.offloader.save_parts("param", [part])
    _parts(state, generator)


def _called_off(state: TrainingState, _generator: random.Random) -> None:
    state.offloader.offload()
    state.offloader.onload(late=KINDS)


def _late(state: TrainingState, _generator: random.Random) -> None:
    state.offloader.onload(late=KINDS)
    state.guard(KINDS)


def _read_only_first(state: TrainingState, _generator: random.Random) -> None:
    state.offloader.onload(["param"], read_only=True)


WAYS_TO_LEAVE: dict[str, Way] = {
    "whole": lambda _state, _generator: None,
    "in parts": _parts,
    "in parts that were saved": _saved_parts,
    "called off and again": _called_off,
}
"""Actions before `offload`."""
WAYS_TO_COME: dict[str, Way] = {
    "whole": lambda _state, _generator: None,
    "late": _late,
    "read only first": _read_only_first,
}
"""Actions before `onload`."""


def leave_and_come_back(state: TrainingState, leave: str, come: str, seed: int) -> None:
    """Train, offload in one way, onload in another, and compare."""
    generator = random.Random(seed)
    state.train()
    with mock.patch.object(
        offload_items, "_PIECE_NBYTES", state.chunk_nbytes * 5 // 8 + 6
    ):  # Splits chunks.
        WAYS_TO_LEAVE[leave](state, generator)
        state.offloader.offload()
        WAYS_TO_COME[come](state, generator)
        state.offloader.onload()
    state.require_intact()
