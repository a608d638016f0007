"""Recorded numbers of a switch's calls of the driver: a measure of its speed without a clock.

For the model of tests/gpu on the software GPU, with both engines in one process and offload of
everything. Numbers may fall, and may rise only in a commit that gives the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

KINDS: Mapping[str, tuple[str, ...]] = {
    "kernels": ("kernel",),
    "copies": ("cuMemcpy", "cuMemcpyAsync", "cuMemcpy2D", "cuMemcpy2DAsync"),
    "fills": ("cuMemset",),
    "waits between streams": ("cuStreamWaitEvent",),
    "waits of the host": ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
    "calls of virtual memory": (
        *("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess"),
        *("cuMemAddressReserve", "cuMemAddressFree"),
    ),
    "descriptors": ("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"),
    "registrations of host memory": ("cuMemHostRegister", "cuMemHostUnregister"),
}
RECORDED: Mapping[str, Mapping[str, int]] = {
    "infer": {
        "kernels": 12,
        "copies": 7,
        "waits between streams": 2,
        "waits of the host": 8,
        "calls of virtual memory": 13,
    },
    "train": {
        "kernels": 4,
        "copies": 1,
        "waits of the host": 4,
        "calls of virtual memory": 4,
    },
}
"""Calls of the last of five switches, including `verify: full`."""


def by_kind(calls: Counter[str]) -> dict[str, int]:
    """Return the sums of calls by kind, without kinds of no calls."""
    sums = {kind: sum(calls[name] for name in names) for kind, names in KINDS.items()}
    return {kind: number for kind, number in sums.items() if number}
