"""Damaged run directories: each is refused by an error that names the file or resumes unharmed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.rl.run_files import Progress, RunFiles
from tests.hybrid_engine.rl.test_run_files import SETTINGS, begun

ROWS = [{"step": step, "reward": 0.5} for step in (0, 10, 20)]
NEWEST = Progress(ROWS[-1], "0123456789abcdef")
PROGRESS = "checkpoints/step-000020/progress.json"
Damage = Callable[[Path], object]


def replace_by(make: Damage) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def write_text(text: str | bytes) -> Damage:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def write_json(value: Any) -> Damage:
    return write_text(json.dumps(value) + "\n")


def move_and_link(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


# files/test_documents.py and files/test_reading.py have further kinds of files.
FILE_DAMAGES: dict[str, Damage] = {
    "a pipe": replace_by(os.mkfifo),
    "a directory": replace_by(Path.mkdir),
    "a link to nothing": replace_by(lambda path: path.symlink_to("nothing/there")),
    "empty": write_text(""),
    "bytes": write_text(bytes(range(256)) * 4),
    "nested": write_text("[" * 100_000),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a moved file": move_and_link,
}
RUN_VALUES: dict[str, Any] = {
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
        f"the step {step}": f'{{"step": {step}}}'
        for step in ("true", "1.5", '"20"', "null", "-1", "NaN", "10", "[20]")
    },
    "a long row": json.dumps({"step": 20, "text": "x" * (1 << 21)}),
}
CHECKPOINTS_DAMAGES: dict[str, Damage] = {
    "a copy beside it": lambda place: shutil.copytree(
        place / "step-000020", place / "step-000020-best1"
    ),
    "a copy with a number": lambda place: shutil.copytree(place / "step-000020", place / "step-9"),
    "a copy with a long number": lambda place: shutil.copytree(
        place / "step-000020", place / "step-0000020"
    ),
    "a copy with other digits": lambda place: shutil.copytree(
        place / "step-000020", place / "step-٠٠٠٠٣٠"
    ),
    "a copy in a copy": lambda place: shutil.copytree(
        place / "step-000020", place / "step-000020" / "step-000030"
    ),
    "a file in its place": lambda place: (place / "step-000030").write_text(""),
    "a link to nothing in its place": lambda place: (place / "step-000030").symlink_to("nothing"),
    "a pipe in its place": lambda place: os.mkfifo(place / "step-000030"),
    "the newest is a link": lambda place: move_and_link(place / "step-000020"),
    "an old one is a link": lambda place: move_and_link(place / "step-000010"),
    "all are elsewhere": move_and_link,
    "a file": lambda place: (shutil.rmtree(place), place.write_text("")),
    "a link to nothing": lambda place: (shutil.rmtree(place), place.symlink_to("nothing")),
}
DAMAGES_BY_PATH: Mapping[str, Mapping[str, Damage]] = {
    "lock": FILE_DAMAGES,
    "run.json": {**FILE_DAMAGES, **{name: write_json(value) for name, value in RUN_VALUES.items()}},
    "metrics.jsonl": {
        **FILE_DAMAGES,
        **{
            name: write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:2]) + line + "\n")
            for name, line in ROW_LINES.items()
        },
    },
    PROGRESS: FILE_DAMAGES,
    "checkpoints": CHECKPOINTS_DAMAGES,
}
DAMAGES = {
    f"{path}: {name}": (path, damage)
    for path, damages in DAMAGES_BY_PATH.items()
    for name, damage in damages.items()
}


def make_run(out: Path) -> None:
    files = begun(out, num_kept=2)
    for row in ROWS:
        files.weights(row["step"]).mkdir(parents=True)
        files.complete(Progress(row, NEWEST.reference))
        files.metrics.append(row)


def resume_run(out: Path) -> None:
    """Access the files like `train`, twice; fails unless it resumes from the newest checkpoint."""
    files = RunFiles(out, num_kept=1)
    for step in (30, 40):
        files.check(SETTINGS)
        with files.lock():
            files.begin(SETTINGS)
            progress = files.progress()
            newest = NEWEST if step == 30 else Progress({"step": 30})
            assert progress == newest, f"resumed from {progress}"
            files.metrics.has(newest.step)
            files.weights(step).mkdir(parents=True)
            files.complete(Progress({"step": step}))
            files.metrics.append({"step": step})
    steps = [row["step"] for row in files.metrics.rows()]
    assert steps in ([0, 10, 20, 30, 40], [0, 10, 30, 40], [0, 30, 40], [30, 40]), (
        "the last rows alone may be cut off"
    )


def outcome_of(pristine: Path, out: Path, name: str) -> str:
    """Damage a copy and resume it; returns "resumed", "refused: ..." or the defect."""
    shutil.copytree(pristine, out)
    path, damage = DAMAGES[name]
    damage(out / path)
    try:
        resume_run(out)
    except HybridEngineError as error:
        text = str(error)
        return f"refused: {text}" if len(text) < 2000 else "wrong: a long message"
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return "resumed"


def test_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    make_run(tmp_path / "pristine")
    undamaged = tmp_path / "undamaged"
    shutil.copytree(tmp_path / "pristine", undamaged)
    resume_run(undamaged)
    outcomes = {
        name: outcome_of(tmp_path / "pristine", tmp_path / str(number), name)
        for number, name in enumerate(DAMAGES)
    }
    defects = {
        name: outcome
        for name, outcome in outcomes.items()
        if not outcome.startswith(("refused", "resumed"))
    }
    assert defects == {}
    for name, outcome in outcomes.items():
        file_name = Path(DAMAGES[name][0]).name
        is_named = file_name in outcome or "the run in" in outcome
        assert outcome == "resumed" or is_named, f"{name}: the error names another file"


def test_foreign_files_among_checkpoints_stay_and_are_ignored(tmp_path: Path) -> None:
    for number, name in enumerate(
        ["a copy beside it", "a copy with a number", "the newest is a link"]
    ):
        out = tmp_path / str(number)
        make_run(out)
        CHECKPOINTS_DAMAGES[name](out / "checkpoints")
        resume_run(out)
    names = [
        sorted(path.name for path in (tmp_path / str(number) / "checkpoints").iterdir())
        for number in range(3)
    ]
    kept = ["step-000000", "step-000040"]
    assert names == [[kept[0], "step-000020-best1", kept[1]], [*kept, "step-9"], kept]
    assert (tmp_path / "2" / "elsewhere-step-000020" / "progress.json").exists(), (
        "the target of the link"
    )
