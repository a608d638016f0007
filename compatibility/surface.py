"""`make vllm-surface VERSION=…`: what wheels.py of the surface does, and a record of it."""

from __future__ import annotations

import platform
import sys

from compatibility.records import Record, add, commit, now
from hybrid_engine.backends.vllm.surface import wheels
from hybrid_engine.backends.vllm.surface.behaviours import BEHAVIOURS
from hybrid_engine.errors import DependencyError


def main(version: str) -> int:
    """Print what differs, and record how much; returns 1 if anything does, 2 without a wheel."""
    try:
        result = wheels.compare_wheel(version)
    except DependencyError as error:
        print(error, file=sys.stderr)
        return 2
    status = wheels.report(version, result)
    record = Record(
        run="vllm-surface",
        python=platform.python_version(),
        torch="",
        megatron="",
        vllm=version,
        passed=result.num_names + len(BEHAVIOURS) - len(result.faults) - len(result.unread),
        failed=len(result.faults),
        skipped=len(result.unread),
        date=now(),
        commit=commit(),
    )
    add(record)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
