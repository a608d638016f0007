"""What ranks wrote about their tests becomes an outcome per test."""

from __future__ import annotations

import json
from pathlib import Path

from tests.megatron_lm.unit_tests import Outcome, by_ranks, of_file, passed, read_outcomes


def test_the_worst_phase_counts_and_a_test_without_any_is_unfinished(tmp_path: Path) -> None:
    lines = [
        ("a.py::ends", "unfinished", ""),
        ("a.py::fails_at_its_end", "unfinished", ""),
        ("b.py::hangs", "unfinished", ""),
        ("a.py::ends", "passed", ""),
        ("a.py::fails_at_its_end", "passed", ""),
        ("a.py::fails_at_its_end", "failed", "why"),
        ("c.py", "failed", "cannot be read"),
    ]
    path = tmp_path / "rank0.jsonl"
    entries = ({"test": test, "outcome": outcome, "reason": reason} for test, outcome, reason in lines)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    outcomes = read_outcomes(path)
    assert outcomes == {
        "a.py::ends": Outcome("passed"),
        "a.py::fails_at_its_end": Outcome("failed", "why"),
        "b.py::hangs": Outcome("unfinished"),
        "c.py": Outcome("failed", "cannot be read"),
    }
    assert passed(of_file("a.py", outcomes)) == {"a.py::ends"}
    assert of_file("c.py", outcomes) == {"c.py": Outcome("failed", "cannot be read")}


def test_files_that_take_as_many_ranks_share_a_launch() -> None:
    files = ["test_optimizer.py", "resharding/test_model_swap.py", "unknown.py"]
    assert by_ranks(files) == {2: ["test_optimizer.py", "unknown.py"], 4: ["resharding/test_model_swap.py"]}
