"""Compares what is on the device in each phase with the memory plan."""

from __future__ import annotations

import logging

from hybrid_engine.layouts.memory_plan import MemoryPlan

logger = logging.getLogger("hybrid_engine")

_TOLERATED_SHARE, _TOLERATED_NBYTES = 0.05, 2**20
"""Of a phase, beyond its plan: padding of buffers, and their last pages."""


class MemoryWatch:
    """One rank's.

    Args:
        plan: of the job.
        rank: of this process.

    Attributes:
        measured: phase -> most bytes seen so far.
    """

    def __init__(self, plan: MemoryPlan, rank: int) -> None:
        self.plan = plan
        self.measured: dict[str, int] = {}
        self._rank = rank
        self._warned: set[str] = set()

    def note(self, phase: str, nbytes: int, began_in: str | None = None) -> None:
        """So many bytes of weights and training state are on the device. Logs, once for each phase, if that is more
        than was planned, or than the budget.

        `began_in`: the phase in which a switch began, for it begins with all that this one had.
        """
        self.measured[phase] = max(self.measured.get(phase, 0), nbytes)
        planned = max(int(self.plan.phases[name].total[self._rank]) for name in (phase, began_in) if name is not None)
        allowed = planned + max(planned * _TOLERATED_SHARE, _TOLERATED_NBYTES)
        over = [("planned", planned)] if nbytes > allowed else []
        if self.plan.budget is not None and nbytes > self.plan.budget:
            over.append(("the budget", self.plan.budget))
        if over and phase not in self._warned:
            self._warned.add(phase)
            against = " and ".join(f"{what} {limit:,}" for what, limit in over)
            logger.warning(
                "[Memory] rank %d, %s: %s bytes on the device, %s", self._rank, phase, f"{nbytes:,}", against
            )

    def report(self) -> str:
        """This rank's plan as a table, with what was measured."""
        return "\n".join(self.plan.lines(self._rank, self.measured))
