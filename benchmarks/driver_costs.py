"""Costs of the driver's virtual memory, measured on one H100 and one H200, by size of a chunk.

Driver 580.159, CUDA 13.0, on 27 November 2026 (docs/benchmarks.md); `benchmarks.driver` measures
them. `benchmarks.critical_path` charges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CHUNKS_MIB = (2, 32, 128, 512)
MICROSECONDS: Mapping[str, Sequence[float]] = {
    "create": (22, 18, 24, 25),
    "map, with access": (73, 56, 67, 85),
    "unmap": (37, 34, 38, 45),
    "release": (194, 35, 280, 301),
    "export": (932, 837, 803, 812),
}
"""Microseconds of a call, by chunk size: the H100's; export, which was not measured there, the
H200's."""
TAKE = ("create", "map, with access")
GIVE_BACK = ("unmap", "release")


def seconds_of(calls: Sequence[str], nbytes: float) -> float:
    """Return the seconds of these calls for a chunk, between the sizes that were measured."""
    sizes = [mib * 2**20 for mib in CHUNKS_MIB]
    return sum(float(np.interp(nbytes, sizes, MICROSECONDS[call])) for call in calls) / 1e6
