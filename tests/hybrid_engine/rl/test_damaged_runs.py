"""A hundred damaged run directories: each is refused by an error of ours, or goes on as if nothing were wrong with it.

python -m tests.hybrid_engine.rl.test_damaged_runs          # a line for each, and the counts
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.rl.run_files import Progress, RunFiles

SETTINGS: dict[str, Any] = {"world_size": 2, "actor_config": {"lr": 0.1}, "rl_config": {"seed": 0, "epochs": 1}}
ROWS = [{"step": step, "reward": 0.5} for step in (0, 10, 20)]
NEWEST = Progress(20, ROWS[-1], "0123456789abcdef")
PROGRESS = "checkpoints/step-000020/progress.json"
SECONDS = 5

Damage = Callable[[Path], object]


def replaced(make: Damage) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def listening(path: Path) -> None:
    where = os.getcwd()
    os.chdir(path.parent)  # a socket's name has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(where)


def of_text(text: str | bytes) -> Damage:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def of_json(value: Any) -> Damage:
    return of_text(json.dumps(value) + "\n")


def moved_and_linked(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


TO_ANY_FILE: dict[str, Damage] = {
    "a pipe": replaced(os.mkfifo),
    "a directory": replaced(Path.mkdir),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a terminal": replaced(lambda path: path.symlink_to("/dev/tty")),
    "a link to nothing": replaced(lambda path: path.symlink_to("nothing/there")),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a socket": replaced(listening),
    "empty": of_text(""),
    "bytes": of_text(bytes(range(256)) * 4),
    "zeros": of_text(bytes(4096)),
    "2 GB": lambda path: os.truncate(path, 1 << 31),
    "nested": of_text("[" * 100_000),
    "nested mappings": of_text('{"a":' * 50_000),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a moved file": moved_and_linked,
}
PROGRESSES: dict[str, Any] = {
    **{f"step {step!r}": {"step": step, "row": ROWS[-1]} for step in (-1, 2.5, True, 7, "20", None, [20], 10**400)},
    **{f"row {row!r}": {"step": 20, "row": row} for row in ([], None, "row", 5, {}, {"step": 19}, {"step": 20.0})},
    "without a row": {"step": 20},
    "without a step": {"row": ROWS[-1]},
    "another key": {"step": 20, "row": ROWS[-1], "code": "x"},
    "a reference that is a number": {"step": 20, "row": ROWS[-1], "reference": 5},
    "a list": [20, ROWS[-1]],
    "a number": 20,
}
RUNS: dict[str, Any] = {
    **{f"{value!r}": value for value in ([], "run", 5, None, {}, {"seed": 3})},
    "a section that is a number": SETTINGS | {"rl_config": 5},
    "a section that is a list": SETTINGS | {"rl_config": [1]},
    "a section that is null": SETTINGS | {"rl_config": None},
    "another section": SETTINGS | {"more": {}},
    "another value": SETTINGS | {"world_size": "2" * 10_000},
}
ROW_LINES: dict[str, str] = {
    **{f"the row {row}": row for row in ("[]", "5", "null", '"row"', "{}", "no json", "")},
    **{
        f"the step {step}": f'{{"step": {step}}}' for step in ("true", "1.5", '"20"', "null", "-1", "NaN", "10", "[20]")
    },
    "a long row": json.dumps({"step": 20, "text": "x" * (1 << 21)}),
}
TO_CHECKPOINTS: dict[str, Damage] = {
    "a copy beside it": lambda place: shutil.copytree(place / "step-000020", place / "step-000020-best1"),
    "a copy with a number": lambda place: shutil.copytree(place / "step-000020", place / "step-9"),
    "a copy with a long number": lambda place: shutil.copytree(place / "step-000020", place / "step-0000020"),
    "a copy with other digits": lambda place: shutil.copytree(place / "step-000020", place / "step-٠٠٠٠٣٠"),
    "a copy in a copy": lambda place: shutil.copytree(place / "step-000020", place / "step-000020" / "step-000030"),
    "a file in its place": lambda place: (place / "step-000030").write_text(""),
    "a link to nothing in its place": lambda place: (place / "step-000030").symlink_to("nothing"),
    "a pipe in its place": lambda place: os.mkfifo(place / "step-000030"),
    "the newest is a link": lambda place: moved_and_linked(place / "step-000020"),
    "an old one is a link": lambda place: moved_and_linked(place / "step-000010"),
    "all are elsewhere": moved_and_linked,
    "a file": lambda place: (shutil.rmtree(place), place.write_text("")),
    "a link to nothing": lambda place: (shutil.rmtree(place), place.symlink_to("nothing")),
}
OF_PLACES: Mapping[str, Mapping[str, Damage]] = {
    "lock": TO_ANY_FILE,
    "run.json": {**TO_ANY_FILE, **{name: of_json(value) for name, value in RUNS.items()}},
    "metrics.jsonl": {
        **TO_ANY_FILE,
        **{
            name: of_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:2]) + line + "\n")
            for name, line in ROW_LINES.items()
        },
    },
    PROGRESS: {
        **TO_ANY_FILE,
        **{name: of_json(value) for name, value in PROGRESSES.items()},
        "step NaN": of_text('{"step": NaN, "row": {"step": 20}}'),
        "two steps": of_text('{"step": 20, "step": 10, "row": {"step": 20}}'),
    },
    "checkpoints": TO_CHECKPOINTS,
}
DAMAGES = {f"{place}: {name}": (place, damage) for place, of in OF_PLACES.items() for name, damage in of.items()}


def make_run(out: Path) -> None:
    files = RunFiles(out, num_kept=2)
    files.lock().close()
    files.begin(SETTINGS)
    for row in ROWS:
        files.weights(row["step"]).mkdir(parents=True)
        files.complete(Progress(row["step"], row, NEWEST.reference))
        files.metrics.append(row)


def go_on(out: Path) -> None:
    """What `train` does with these files, twice. Fails where it went on from something else than was there."""
    files = RunFiles(out, num_kept=1)
    for step in (30, 40):
        files.check(SETTINGS)
        with files.lock():
            files.begin(SETTINGS)
            progress = files.progress()
            newest = NEWEST if step == 30 else Progress(30, {"step": 30})
            assert progress == newest, f"went on from {progress}"
            files.metrics.has(newest.step)
            files.weights(step).mkdir(parents=True)
            files.complete(Progress(step, {"step": step}))
            files.metrics.append({"step": step})
    steps = [row["step"] for row in files.metrics.rows()]
    assert steps in ([0, 10, 20, 30, 40], [0, 10, 30, 40], [0, 30, 40], [30, 40]), "the last rows alone may be cut off"


class HangError(BaseException):
    """Something waited for a file. Not an Exception: readers turn those into errors about the file."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(pristine: Path, out: Path, name: str) -> str:
    """What came of one damage to a copy: "went on", "refused: ..." or what is wrong."""
    shutil.copytree(pristine, out)
    place, damage = DAMAGES[name]
    damage(out / place)
    try:
        with time_limit(SECONDS):
            go_on(out)
    except HybridEngineError as error:
        text = str(error)
        return f"refused: {text}" if len(text) < 2000 else "wrong: a long message"
    except AssertionError as error:
        return f"accepted wrong: {error}"
    except HangError:
        return "hang"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return "went on"


def test_damage_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    make_run(tmp_path / "pristine")
    go_on_without_damage = tmp_path / "as it was"
    shutil.copytree(tmp_path / "pristine", go_on_without_damage)
    go_on(go_on_without_damage)
    found = {
        name: outcome_of(tmp_path / "pristine", tmp_path / str(number), name) for number, name in enumerate(DAMAGES)
    }
    assert {name: what for name, what in found.items() if not what.startswith(("refused", "went on"))} == {}
    for name, what in found.items():
        place = DAMAGES[name][0]
        assert what == "went on" or Path(place).name in what or "the run in" in what, f"{name}: names another file"


def test_strangers_beside_checkpoints_stay_and_are_not_taken_for_one(tmp_path: Path) -> None:
    for number, name in enumerate(["a copy beside it", "a copy with a number", "the newest is a link"]):
        out = tmp_path / str(number)
        make_run(out)
        TO_CHECKPOINTS[name](out / "checkpoints")
        go_on(out)
    names = [sorted(path.name for path in (tmp_path / str(number) / "checkpoints").iterdir()) for number in range(3)]
    kept = ["step-000000", "step-000040"]
    assert names == [[kept[0], "step-000020-best1", kept[1]], [*kept, "step-9"], kept]
    assert (tmp_path / "2" / "elsewhere-step-000020" / "progress.json").exists(), "what the link led to"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        make_run(Path(directory, "pristine"))
        counts: Counter[str] = Counter()
        for number, name in enumerate(DAMAGES):
            what = outcome_of(Path(directory, "pristine"), Path(directory, str(number)), name)
            counts[what.partition(":")[0]] += 1
            print(f"{name}: {what}")
        print(f"{counts.total()} damaged runs: {dict(counts)}")


if __name__ == "__main__":
    main()
