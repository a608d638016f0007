"""How checks run, and what is left of them when their process dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_engine.verification.gpu.checks import (
    CannotCheckError,
    Check,
    Colour,
    NothingToCheckError,
    Planned,
    judged,
    read_results,
    run_checks,
    worst,
)


def found(*colours: Colour) -> Iterator[Check]:
    yield from (Check(f"found {colour}", colour) for colour in colours)


def failing(error: BaseException, *before: Colour) -> Iterator[Check]:
    yield from found(*before)
    raise error


def results_of(path: Path, *planned: Planned, ending: str = "") -> dict[str, tuple[Colour, str]]:
    try:
        run_checks(planned, path)
    except KeyboardInterrupt:
        assert ending
    return {check.name: (check.colour, check.note) for check in read_results(path, ending)}


def test_an_error_is_a_result_and_the_next_check_runs(tmp_path: Path) -> None:
    seen = results_of(
        tmp_path / "results",
        Planned("breaks", lambda: failing(ValueError("too small"), Colour.GREEN)),
        Planned("lacks", lambda: failing(CannotCheckError("no driver: install one"))),
        Planned("means nothing", lambda: failing(NothingToCheckError("no GPU"))),
        Planned("goes well", lambda: found(Colour.LEFT_OUT)),
    )
    assert seen == {
        "found green": (Colour.GREEN, ""),
        "breaks": (Colour.RED, "ValueError: too small"),
        "lacks": (Colour.MISSING, "no driver: install one"),
        "means nothing": (Colour.LEFT_OUT, "no GPU"),
        "found left out": (Colour.LEFT_OUT, ""),
    }


def test_what_needs_something_that_does_not_work_does_not_run(tmp_path: Path) -> None:
    seen = results_of(
        tmp_path / "results",
        Planned("driver", lambda: failing(CannotCheckError("no driver: install one"))),
        Planned("build", lambda: found(Colour.GREEN, Colour.RED)),
        Planned("switch", lambda: found(Colour.GREEN), ("build", "driver")),
        Planned("again", lambda: found(Colour.GREEN), ("switch",)),
        Planned("alone", lambda: found(Colour.GREEN)),
    )
    why = "needs build: see above; driver: no driver: install one"
    assert seen["switch"] == (Colour.MISSING, why)
    assert seen["again"] == (Colour.MISSING, why)
    assert "alone" not in seen


def test_a_figure_beyond_its_limit_stops_nothing(tmp_path: Path) -> None:
    seen = results_of(
        tmp_path / "results",
        Planned("speed", lambda: iter([judged("slow", False, "1 GB/s", "at least 2 GB/s")])),
        Planned("leaves out", lambda: failing(NothingToCheckError("no GPU"))),
        Planned("next", lambda: found(Colour.GREEN), ("speed", "leaves out")),
    )
    assert {name: colour for name, (colour, _) in seen.items()} == {
        "slow": Colour.RED,
        "leaves out": Colour.LEFT_OUT,
        "found green": Colour.GREEN,
    }


def test_a_process_that_dies_loses_what_it_had_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "results"
    seen = results_of(
        path,
        Planned("first", lambda: found(Colour.GREEN)),
        Planned("second", lambda: failing(KeyboardInterrupt(), Colour.LEFT_OUT)),
        Planned("third", lambda: found(Colour.GREEN)),
        ending="signal 11",
    )
    assert seen == {
        "found green": (Colour.GREEN, ""),
        "found left out": (Colour.LEFT_OUT, ""),
        "second": (Colour.RED, "signal 11"),
        "third": (Colour.MISSING, "not reached: signal 11"),
    }
    cut_short = {check.name: check.colour for check in read_results(path, "no time", Colour.MISSING)}
    assert cut_short["second"] is Colour.MISSING
    with path.open("a") as file:
        file.write('{"found": {"na')  # it died while it wrote
    assert len(read_results(path, "")) == 4
    assert read_results(tmp_path / "none", "") == []


def test_the_worst_counts() -> None:
    assert worst([]) is Colour.LEFT_OUT
    assert worst([Colour.GREEN, Colour.LEFT_OUT]) is Colour.GREEN
    assert worst([Colour.RED, Colour.MISSING]) is Colour.RED


@pytest.mark.parametrize(("is_good", "colour", "note"), [(True, Colour.GREEN, ""), (False, Colour.RED, "why")])
def test_a_note_is_for_what_is_red(is_good: bool, colour: Colour, note: str) -> None:
    assert judged("it", is_good, "1 s", note="why", seconds=1.0) == Check(
        "it", colour, "1 s", "", note, {"seconds": 1.0}
    )
