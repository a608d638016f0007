"""What a check of `check-gpu` is and says, and how a process runs its checks one after the other.

    a job's process:  run_checks(planned, results file)     one line of JSON for each result, as soon as it is there
    check-gpu itself: found_so_far(results file), and at the end read_results(results file, how the process ended)

So a process that dies or takes too long loses the checks that it had not finished, and nothing else.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path


class Colour(StrEnum):
    """What a check found, from the best to the worst."""

    LEFT_OUT = "left out"
    """It has no meaning here, which is no fault."""
    GREEN = "green"
    MISSING = "missing"
    """It could not run; the note says what is missing, and the remedy."""
    RED = "red"


def worst(colours: Collection[Colour]) -> Colour:
    """Of several; LEFT_OUT of none."""
    return max(colours, key=list(Colour).index, default=Colour.LEFT_OUT)


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Attributes:
        name: what was checked.
        colour: what was found.
        figure: what was measured, for people.
        floor: what it is beside, and the limit by which it was judged.
        note: why it is not green, with a remedy.
        values: the figures for programs, in bytes and seconds.
    """

    name: str
    colour: Colour
    figure: str = ""
    floor: str = ""
    note: str = ""
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def stops_others(self) -> bool:
        """Whether something does not work or could not run, as against a figure beyond its limit."""
        return self.colour is Colour.MISSING or (self.colour is Colour.RED and not self.floor)


class CannotCheckError(Exception):
    """A check cannot run; the message says what is missing, and the remedy."""


class NothingToCheckError(Exception):
    """A check has no meaning here; the message says why."""


@dataclass(frozen=True)
class Planned:
    """A check to come, which may have several results.

    Attributes:
        name: of the check, or of all its results together.
        run: yields the results; what it raises is a result too.
        needs: names of planned checks that must have gone well before; a figure beyond its limit is well enough.
    """

    name: str
    run: Callable[[], Iterator[Check]]
    needs: tuple[str, ...] = ()


def judged(name: str, is_good: bool, figure: str = "", floor: str = "", note: str = "", **values: float) -> Check:
    """Green or red. `note` is said where it is red."""
    return Check(name, Colour.GREEN if is_good else Colour.RED, figure, floor, "" if is_good else note, values)


def run_checks(planned: Sequence[Planned], results: Path) -> None:
    """Run them in order; append what is planned, begun and found to the file."""
    with results.open("a") as file:

        def tell(**line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        tell(planned=[each.name for each in planned])
        unmet: dict[str, str] = {}  # of planned checks that did not go well: which began it, and why
        for each in planned:
            tell(begun=each.name)
            lacking = "; ".join(dict.fromkeys(unmet[name] for name in each.needs if name in unmet))
            for check in _results_of(each, lacking):
                tell(found=asdict(check))
                if check.stops_others:
                    why = check.note if check.colour is Colour.MISSING else "see above"
                    unmet.setdefault(each.name, lacking or f"{each.name}: {why}")
            tell(ended=each.name)


def _results_of(planned: Planned, lacking: str) -> Iterator[Check]:
    if lacking:
        yield Check(planned.name, Colour.MISSING, note=f"needs {lacking}")
        return
    try:
        yield from planned.run()
    except CannotCheckError as error:
        yield Check(planned.name, Colour.MISSING, note=str(error))
    except NothingToCheckError as error:
        yield Check(planned.name, Colour.LEFT_OUT, note=str(error))
    except Exception as error:
        yield Check(planned.name, Colour.RED, note=f"{type(error).__name__}: {error}")
        traceback.print_exc()  # among the job's output, which is shown for a job with something red


def read_results(results: Path, ending: str, colour: Colour = Colour.RED) -> list[Check]:
    """Every result in the file, and of what its process did not finish that it is missing.

    Args:
        results: the file; none where the process did not get so far.
        ending: how the process ended.
        colour: of the check that was under way then.
    """
    lines = [json.loads(line) for line in _whole_lines(results)]
    found = found_so_far(results)
    begun = [line["begun"] for line in lines if "begun" in line]
    ended = [line["ended"] for line in lines if "ended" in line]
    names = [name for line in lines for name in line.get("planned", ())]
    for name in names:
        if name in begun and name not in ended:
            found.append(Check(name, colour, note=ending))
        elif name not in begun:
            found.append(Check(name, Colour.MISSING, note=f"not reached: {ending}"))
    return found


def found_so_far(results: Path) -> list[Check]:
    """Every result in the file, which its process may be writing still."""
    found = [line["found"] for line in map(json.loads, _whole_lines(results)) if "found" in line]
    return [Check(**{**each, "colour": Colour(each["colour"])}) for each in found]


def _whole_lines(path: Path) -> list[str]:
    """Without the last one where its process died in the middle of it."""
    text = path.read_text() if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()
