"""What models beside the actor have in common: they have the device to themselves, and leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS, Kind, OffloadItem, Reached, held_nbytes
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.worker import ActorHybridWorker

ALL: frozenset[Kind] = frozenset(KINDS)
PARAMETERS: frozenset[Kind] = frozenset({"param"})


def require_room(worker: ActorHybridWorker, name: str, nbytes: int) -> None:
    """Raise StateError unless the budget has room for a model's parameters beside what is on the device. Collective."""
    if not worker.has_room_for(nbytes):
        problem = f"device_budget_gib has no room for the parameters of the {name} beside what is on the device"
        raise StateError(f"{problem}; do this in worker.forward_context(), or raise the budget")


class Companion:
    """A model beside the actor. All methods are collective, but for `require` and `resident_nbytes`.

    Args:
        name: in messages, and in the memory plan.
        worker: of the actor.
        items, reachable: of this model, which is on the device now; as for `Offloader`.
        offloads: it leaves the device outside its contexts.
        gathers_late: reading it completes parameters that its optimizer left to be gathered, and so writes them.
    """

    def __init__(
        self,
        name: str,
        worker: ActorHybridWorker,
        items: Callable[[], Iterable[OffloadItem]],
        *,
        reachable: Callable[[], Iterable[Reached]] = tuple,
        offloads: bool = True,
        gathers_late: bool = False,
    ) -> None:
        self.name = name
        self._worker = worker
        self._agreement = worker.job.agreement
        self._items = items
        self._offloader = Offloader(items, reachable=reachable)
        self._offloads, self._gathers_late = offloads, gathers_late
        self._present: frozenset[Kind] = ALL
        if offloads:
            self._leave_together()
        worker.companions.add(self)

    @property
    def has_the_device(self) -> bool:
        """Whether it is in one of its contexts."""
        return self._offloads and bool(self._present)

    def resident_nbytes(self) -> int:
        """Bytes of this model's state on this rank's device."""
        return held_nbytes(self._items(), self._worker.job.device.type)

    def require(self, kinds: Iterable[str]) -> None:
        """Raise StateError unless these kinds of state are on the device."""
        wanted = set(kinds)
        if not wanted <= self._present:
            where = "forward_context or train_context" if wanted <= PARAMETERS else "train_context"
            raise StateError(f"the {self.name} is not on the device; call this in its {where}")

    def entered(self, kinds: frozenset[Kind], phase: str) -> AbstractContextManager[None]:
        """Be on the device with these kinds inside the context, and, unless it stays there, alone.

        The actor's state and vLLM's weights leave it, as far as the configuration lets them. Inside a context of the
        worker they are back at the end; elsewhere the worker's next context brings what it needs. `phase` is the memory
        plan's.
        """
        if kinds <= self._present:  # it stays there, or is in another context of its own
            return nullcontext()
        present = [one.name for one in self._worker.companions if one.has_the_device]
        if present:
            raise StateError(f"{phase} inside a context of the {present[0]}; leave that one first")
        return self._alone(kinds, phase)

    @contextmanager
    def _alone(self, kinds: frozenset[Kind], phase: str) -> Iterator[None]:
        # what is gathered must be kept: Megatron notes that it was, and never does it again
        read_only = kinds == PARAMETERS and not self._gathers_late
        with self._worker.sharding.entered(State.IDLE), self._here(kinds, read_only=read_only):
            yield
            self._worker.note_memory(phase)

    @contextmanager
    def beside(self, kinds: frozenset[Kind], *, read_only: bool) -> Iterator[None]:
        """Be on the device with these kinds inside the context, beside what is there; `read_only`: nothing changes."""
        if kinds <= self._present:
            yield
            return
        with self._here(kinds, read_only=read_only):
            yield

    @contextmanager
    def _here(self, kinds: frozenset[Kind], *, read_only: bool) -> Iterator[None]:
        """On the device inside the context; all ranks leave it together, but those with an error."""
        try:
            self._come(kinds, read_only=read_only)
            yield
        except BaseException:
            self._leave()  # alone: the others may be well, and elsewhere
            raise
        self._leave_together()

    def _come(self, kinds: frozenset[Kind], *, read_only: bool) -> None:
        with self._agreement.phase(f"onload of the {self.name}"):
            self._offloader.onload(kinds, read_only=read_only)
        self._present = kinds

    def _leave_together(self) -> None:
        with self._agreement.phase(f"offload of the {self.name}"):
            self._leave()

    def _leave(self) -> None:
        self._present = frozenset()
        self._offloader.offload()
