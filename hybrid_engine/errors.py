"""The exceptions of the engine.

HybridEngineError
├── ConfigError          the configuration is invalid; lists every violation with key and remedy
│   └── ArgumentError          the arguments of a call are invalid
├── BatchError           a batch cannot be computed; lists every violation with key and remedy
├── LossError            a loss function failed, or returned an invalid value
├── DependencyError      a package is missing, or its version was not tested
├── ModelError           the model cannot be mapped between the engines
│   ├── UnknownModelError      no name table for the architecture
│   └── ParameterMismatchError a parameter has no counterpart, or a different shape
├── PlanError            the two layouts are inconsistent; lists every fault
├── WeightError          a weight has an unusable value (NaN, Inf)
├── StateError           the call is not allowed in the current state
│   └── DifferentCallsError    ranks make different calls; names the call of each rank
├── FileError            a file cannot be read or written; names the file, the problem and a remedy
├── DeviceMemoryError    the device's driver refused an allocation or another call on memory
├── MessageError         a message is invalid: another version, too long, or malformed
├── GenerationError      vLLM failed during generation; weights and state are unchanged
├── ServerError          a vLLM server refused a call, or cannot be reached; state is unchanged
└── ReshardError         a switch failed; names the phase, and the state that was restored
    ├── ComputationError vLLM and the trainer compute different functions; names both numbers
    ├── OffloadError     state could not be moved off the device or back
    ├── LostRankError    a rank exited or does not respond; the job cannot continue
    ├── RemoteError      the cause is on another rank; carries that rank's message
    └── TransportError   a transfer failed or timed out; names peer, bucket and phase
        └── PeerTransportError   (also a RemoteError) a peer could not do its part of a bucket
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, Self, TypeVar

Finding = TypeVar("Finding")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def shortened(value: object, most: int = 200) -> str:
    """Return the repr of `value` for a message, cut with a `…` after `most` characters.

    Reads no more of a collection than it shows, because a few bytes of YAML can expand to
    gigabytes.
    """
    return clipped(_SHORT.repr(value), most)


def clipped(text: str, most: int = 200) -> str:
    """Return `text` printable, cut with a `…` after `most` characters.

    File names may not be UTF-8.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return cut.encode(errors="backslashreplace").decode()


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first `most` items, and add the number of further items."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{separator.join(items[:most])}{more}"


def is_of_user(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is neither of this package nor of what lies between it and a user."""
    return not frame.filename.startswith(_NOT_OF_USER)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which `name` is probably a misspelling, or None."""
    return next(iter(difflib.get_close_matches(clipped(name), list(known), n=1, cutoff=0.7)), None)


def collect(
    violations: list[Violation],
    function: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result | None:
    """Return the function's result; after a ConfigError, add its violations and return None."""
    try:
        return function(*args, **kwargs)
    except ConfigError as error:
        violations.extend(error.findings)
        return None


@contextmanager
def needing_package(message: str) -> Iterator[None]:
    """Raise DependencyError with this message if the block finds no package to import."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DependencyError(message, code="needs-package") from error


_NOT_OF_USER = (
    os.path.dirname(__file__) + "/",
    "<frozen ",
    *map(os.path.dirname(os.__file__).__add__, ("/asyncio/", "/concurrent/", "/contextlib.py")),
    sysconfig.get_path("purelib") + "/typer/",
)
_INDEX = re.compile(r"\[\d+\]|\.\d+(?=\.|$)| \d+$")
"""Index in a key, as in prompts[7] and 'reward 7'."""


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        """Show the size of a huge number instead: Python refuses to convert thousands of digits."""
        bits = value.bit_length()
        return f"a number of {bits} bits" if bits > 1000 else super().repr_int(value, level)


_SHORT = _Short()
_SHORT.maxlevel = 4
_SHORT.maxstring = 200
_SHORT.maxlong = 100
_SHORT.maxother = 200
_SHORT.maxdict = 10
_SHORT.maxlist = 10
_SHORT.maxtuple = 10
_SHORT.maxset = 10


class HybridEngineError(Exception):
    """Base class of every error that this package raises deliberately.

    Attributes:
        code: stable name of the problem, in kebab-case, such as "worker-is-closed". Programs and
            tests compare it; the message is for people and may change with any release. Errors
            that list findings have "" here, because each of their findings has a code.
        cause_on_rank_0: on a rank above 0, the error of rank 0 that explains this failure, as
            formatted by `agreement.described`; "" if rank 0 has none; None if the ranks have not
            agreed on it.
    """

    cause_on_rank_0: str | None = None

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class _FindingsError(HybridEngineError, Generic[Finding]):
    """Error that reports all findings at once.

    The message has one line per finding, and at most `MAX_LINES` lines. More than `MAX_ALIKE`
    violations with one remedy and code, whose keys differ in an index alone, share one line.

    Attributes:
        findings: all findings.
        source: file to which the findings refer; None if it is not a file.
    """

    heading = "invalid"
    MAX_LINES = 200
    MAX_ALIKE = 3

    def __init__(self, findings: Sequence[Finding], source: str | None = None) -> None:
        self.findings = tuple(findings)
        self.source = source
        lines = self._lines()
        if len(lines) > self.MAX_LINES:
            lines = [*lines[: self.MAX_LINES], f"  - and {len(lines) - self.MAX_LINES} more"]
        of_file = "" if source is None else f" in {clipped(source)}"
        listed = "\n".join(lines)
        super().__init__(f"{self.heading}{of_file} ({len(self.findings)}):\n{listed}")

    def _lines(self) -> list[str]:
        alike: dict[object, list[Finding]] = {}
        for number, finding in enumerate(self.findings):
            kind: object = number
            if isinstance(finding, Violation) and _INDEX.search(finding.key):
                text = finding.code or finding.problem
                kind = (_INDEX.sub("[]", finding.key), text, finding.remedy)
            alike.setdefault(kind, []).append(finding)
        lines = []
        for group in alike.values():
            others = [finding.key for finding in group[1:] if isinstance(finding, Violation)]
            # Those at one key differ in their text.
            is_shared = len({*others}) == len(others) >= self.MAX_ALIKE
            lines += [f"  - {finding}" for finding in (group[:1] if is_shared else group)]
            if is_shared:
                where = first_of(others, self.MAX_ALIKE)
                lines[-1] += f" ({len(group):,} of this kind, the others at {where})"
        return lines

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Finding, ...], str | None]]:
        return type(self), (self.findings, self.source)


@dataclass(frozen=True)
class Violation:
    """One invalid setting.

    Attributes:
        key: the configuration key or command-line option.
        problem: what is wrong, with the numbers.
        remedy: what to do.
        code: stable name of the problem, in kebab-case; see `HybridEngineError.code`.
    """

    key: str
    problem: str
    remedy: str
    code: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return f"{self.key}: {self.problem.removesuffix('.')}. {self.remedy}"


Violations = Iterator[Violation]


class _ViolationsError(_FindingsError[Violation]):
    """Error whose findings are violations."""

    @classmethod
    def of(cls, key: str, problem: str, remedy: str, *, code: str) -> Self:
        """Return the error of a single `Violation`."""
        return cls([Violation(key, problem, remedy, code=code)])


class ConfigError(_ViolationsError):
    """The configuration is invalid; `findings` holds every `Violation`."""

    heading = "invalid configuration"


class ArgumentError(ConfigError):
    """Arguments of a call are invalid; the key of a `Violation` in `findings` is the argument."""

    heading = "invalid arguments"


def require_none(
    violations: Iterable[Violation],
    kind: type[_ViolationsError] = ConfigError,
) -> None:
    """Raise an error of this kind with these violations, if there are any."""
    every = [*violations]
    if every:
        raise kind(every)


class BatchError(_ViolationsError, ValueError):
    """A batch cannot be computed; `findings` holds every `Violation`, whose key is the batch's."""

    heading = "unusable batch"


class LossError(HybridEngineError, TypeError):
    """A loss function failed, or returned an invalid value; the message names it.

    No weight has changed.
    """


class DependencyError(HybridEngineError):
    """A package is missing, or its version was not tested; the message names the tested ones."""


class ModelError(HybridEngineError):
    """The model cannot be mapped between the two engines."""


class UnknownModelError(ModelError):
    """No name table for the architecture."""


class ParameterMismatchError(ModelError, _FindingsError[str]):
    """Parameters without a counterpart or with a different shape; `findings` names each of them."""

    heading = "mismatched parameters"


class PlanError(_FindingsError[str]):
    """The two layouts are inconsistent; `findings` holds every fault."""

    heading = "inconsistent layouts"


class WeightError(_FindingsError[str]):
    """Weights with unusable values; `findings` names every parameter."""

    heading = "unusable weights"


class StateError(HybridEngineError):
    """The call is not allowed in the current state."""


class DifferentCallsError(StateError):
    """Ranks make different calls; the message names the call of each rank."""


class FileError(HybridEngineError):
    """A file cannot be read or written; the message names the file, the problem and a remedy.

    Mostly raised by `files.durable.naming`, with the original error as the cause.
    """


class DeviceMemoryError(HybridEngineError):
    """The device's driver refused a call on memory; the message has the call and the error code.

    Attributes:
        is_out_of_memory: the device has too little free memory; the call may succeed after some was
            freed.
    """

    def __init__(self, message: str, *, code: str = "", is_out_of_memory: bool = False) -> None:
        super().__init__(message, code=code)
        self.is_out_of_memory = is_out_of_memory


class MessageError(HybridEngineError):
    """A message from another process is invalid: another version, too long, or malformed."""


class GenerationError(HybridEngineError):
    """vLLM failed during generation; the message contains its error. Other ranks raise RemoteError.

    Weights and state are unchanged, and vLLM has dropped the requests: generate again, or train.
    """


class ServerError(HybridEngineError):
    """A vLLM server refused a call, or cannot be reached; training state is unchanged."""


class ReshardError(HybridEngineError):
    """A switch failed; the message names the ranks, the phase, and the state that was restored."""


class TransportError(ReshardError):
    """A transfer failed or timed out; the message names the peer, the bucket and the phase."""


class RemoteError(ReshardError):
    """Another rank failed; the message carries that rank's own error."""


class LostRankError(ReshardError):
    """A rank exited or does not respond; the message names the rank, and the reason if it is known.

    The job's process groups are unusable afterwards: no collective can follow.

    Attributes:
        is_explained: the message contains the reason: a process ended or is stopped, or a rank
            reported a failure.
    """

    is_explained: bool = False


class PeerTransportError(TransportError, RemoteError):
    """A peer could not do its part of a bucket; the message carries the peer's own error."""


class ComputationError(ReshardError):
    """vLLM and the trainer compute different log-probabilities with the same weights.

    The message has both.
    """


class OffloadError(ReshardError):
    """State could not be moved off the device or back.

    The message names the location of each kind of state.
    """
