"""The process of stage 2 that has both real engines, in an interpreter that has imported nothing.

The rest of `check-gpu --device cpu`: tests/faults/test_check_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_engine.verification.gpu import check_gpu
from hybrid_engine.verification.gpu.check_gpu import Budget, jobs_of
from hybrid_engine.verification.gpu.checks import Colour
from hybrid_engine.verification.gpu.machine import this_machine


@pytest.mark.engines
@pytest.mark.slow
def test_engines_pass_every_check_and_leave_nothing(tmp_path: Path) -> None:
    (engines,) = (job for job in jobs_of(2, "cpu", this_machine(), {}, tmp_path) if job.name == "engines, eager")
    checks, output = check_gpu._run_job(engines, tmp_path / "results", Budget.beginning_now(300))
    assert [check for check in checks if check.colour is not Colour.GREEN] == [], output
    names = {check.name for check in checks}
    assert {"eager: shut down asleep: nothing is left", "eager: built again"} < names
