"""The exceptions of the engine.

HybridEngineError
├── ConfigError          a configuration is impossible; lists every violation with key and remedy
├── DependencyError      a package is missing or has a version that was not tested
├── ModelError           the model cannot be mapped
│   ├── UnknownModelError      no name table for the architecture
│   └── ParameterMismatchError a parameter has no counterpart, or another shape
├── PlanError            the two layouts do not fit together; lists every fault
├── WeightError          a weight's value is not usable (NaN, Inf)
├── StateError           a call is not allowed in the present state
├── FileError            a file cannot be read or written; names it, and says what is wrong
├── DeviceMemoryError    the device's driver refused memory, or something else about it
└── ReshardError         a switch failed; says in which phase, and what is where
    ├── OffloadError     state could not leave the device or come back
    ├── LostRankError    the ranks parted: one ended, or does not come; the job cannot go on
    ├── RemoteError      the cause lies on another rank; carries that rank's message
    └── TransportError   moving bytes failed or timed out; names peer, bucket and phase
        └── PeerTransportError   (also a RemoteError) a peer could not do its part of a bucket
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass


def shortened(value: object, most: int = 200) -> str:
    """`value` as code would write it, for a message: with a `…` where it is longer than `most` characters.

    Reads no more of a collection than is shown: one of a few bytes of YAML can be gigabytes long when written out.
    """
    return clipped(_SHORT.repr(value), most)


def clipped(text: str, most: int = 200) -> str:
    """`text`, with a `…` where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write out a number of thousands of digits."""
        bits = value.bit_length()
        return f"a number of {bits} bits" if bits > 1000 else super().repr_int(value, level)


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 4, 200, 100, 200
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 10


class HybridEngineError(Exception):
    """Base of every error this package raises on purpose."""


class _ListedError(HybridEngineError):
    """An error that reports all of its findings at once, one a line; `findings` has those past `MOST_LINES` too."""

    heading = "invalid"
    MOST_LINES = 200

    def __init__(self, findings: Sequence[object]) -> None:
        self.findings = tuple(findings)
        lines = "\n".join(f"  - {finding}" for finding in self.findings[: self.MOST_LINES])
        if len(self.findings) > self.MOST_LINES:
            lines += f"\n  - and {len(self.findings) - self.MOST_LINES} more"
        super().__init__(f"{self.heading} ({len(self.findings)}):\n{lines}")

    def __reduce__(self):
        return type(self), (self.findings,)


@dataclass(frozen=True)
class Violation:
    """One impossible setting: the configuration key, what is wrong (with the numbers), and what to do."""

    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}. {self.remedy}"


class ConfigError(_ListedError):
    """The configuration is impossible; `findings` holds every `Violation`."""

    heading = "impossible configuration"


class DependencyError(HybridEngineError):
    """A package is missing or its version was not tested; the message says which version is."""


class ModelError(HybridEngineError):
    """The model cannot be mapped between the two engines."""


class UnknownModelError(ModelError):
    """No name table for the architecture."""


class ParameterMismatchError(ModelError, _ListedError):
    """Parameters without a counterpart or with another shape; `findings` names every one."""

    heading = "parameters that do not match"


class PlanError(_ListedError):
    """The two layouts do not fit together; `findings` holds every fault."""

    heading = "no reshard plan"


class WeightError(_ListedError):
    """Weights whose values cannot be used; `findings` names every parameter."""

    heading = "unusable weights"


class StateError(HybridEngineError):
    """A call that the present state does not allow."""


class FileError(HybridEngineError):
    """A file cannot be read or written; the message names it, and says what is wrong and what to do.

    See `durable_files.naming`, which makes most of them, and whose cause is the original error.
    """


class DeviceMemoryError(HybridEngineError):
    """The device's driver refused a call on memory; the message names the call and the driver's code.

    `is_out_of_memory`: the device has not enough of it; free some and try again.
    """

    def __init__(self, message: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.is_out_of_memory = is_out_of_memory


class ReshardError(HybridEngineError):
    """A switch failed; the message says on which ranks, in which phase, and what state was restored."""


class TransportError(ReshardError):
    """Moving bytes failed or timed out; the message names the peer, the bucket and the phase."""


class RemoteError(ReshardError):
    """Another rank failed; the message carries that rank's own error."""


class LostRankError(ReshardError):
    """The ranks parted: one ended or did not come; the message says which and why, as far as it is known.

    Their process groups are dead: nothing collective can follow in this job.
    """


class PeerTransportError(TransportError, RemoteError):
    """A peer could not do its part of a bucket; the message carries the peer's own error."""


class OffloadError(ReshardError):
    """State could not be taken off the device or put back; the message says what is where."""
