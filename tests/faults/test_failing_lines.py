"""An error at any line of a switch reaches both ranks at once; the next switches are right."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hybrid_engine import switch
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.switch.states import State
from hybrid_engine.switch.weight_container import WeightContainer
from tests.harness.launch import Ranks
from tests.hybrid_engine.switch.fakes import INFER, TRAIN, Rig

pytestmark = pytest.mark.faults

FOLDER = str(Path(switch.__file__).parent)
STEP = 5
"""Number of lines from one error to the next."""
SETTINGS = {
    "mapped memory": {"elastic": True, "incremental": "auto", "incremental_mb": 2, "prefetch": "auto"},
    "messages": {"transport": "collective", "incremental": "delta"},
}


class FailingLine:
    """Context that raises MemoryError at line number `at` that runs in hybrid_engine/switch.

    It skips the lines from the end of `WeightContainer.begin` to the first line of `fill`, where a
    rank could not notify the others: they allocate nothing.

    Attributes:
        where: the failed line; empty if none failed.
    """

    def __init__(self, at: int, container: WeightContainer) -> None:
        self._remaining = at
        self._container = container
        self.where = ""

    def __enter__(self) -> FailingLine:
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        return self._at_line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _at_line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "line" and not self._container._has_begun:
            self._remaining -= 1
            if self._remaining < 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise MemoryError
        return self._at_line


def fail_everywhere(before: State, after: State, settings: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the failed lines of a switch on rank 0, each with the seconds until this rank had
    noticed.

    The last entry has an empty line: the switch ended before it.
    """
    rig = Rig(verify="full", timeout_seconds=20, **settings)
    failures = list[tuple[str, float]]()
    rig.training.step()
    while not failures or failures[-1][0]:
        for target in (INFER, TRAIN, INFER, TRAIN):
            rig.manager.enter(target)
            if target is INFER:
                rig.assert_is(INFER)
            else:
                rig.training.assert_unchanged()
                rig.training.step()
        rig.manager.enter(before)
        at = STEP * len(failures) if rig.job.rank == 0 else sys.maxsize
        began = time.monotonic()
        with suppress(HybridEngineError, MemoryError), FailingLine(at, rig.manager.container) as failing:
            rig.manager.enter(after)
        seconds = time.monotonic() - began
        while True:  # After a failure between two phases, ranks meet in different calls.
            assert rig.job.agreement.lost is None, f"ranks lost each other after {failing.where}, {seconds:.1f} s"
            with suppress(HybridEngineError):
                (where, _) = rig.job.agreement.gather(failing.where, str)
                break
        failures.append((where, seconds))
        rig.manager.enter(TRAIN)
    return failures


@pytest.mark.ranks
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("before", "after"), [(TRAIN, INFER), (INFER, TRAIN)], ids=str)
def test_an_error_at_any_line_reaches_all_ranks_at_once(
    ranks: Ranks, before: State, after: State, settings: str, record: Callable[..., None]
) -> None:
    for *failed, _ in ranks.launch(fail_everywhere, 2, before, after, SETTINGS[settings], timeout=300):
        most = max(seconds for _, seconds in failed)
        record(switch=f"{before}->{after}, {settings}", lines=len(failed), most_seconds=most)
        assert len(failed) > 20
        assert {where: seconds for where, seconds in failed if seconds > 5} == {}
