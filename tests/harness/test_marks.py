"""Files are left unimported exactly if `-m` deselects all of their tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import marks
from tests.harness.launch import REPO_ROOT

FAST = "not ranks and not slow"
SOURCE = """
import pytest
@pytest.fixture
def rig(engines): ...
@pytest.mark.slow
def test_one(): ...
class TestTwo:
    def test_two(self, {taken}): ...
"""


@pytest.mark.parametrize(
    ("taken", "expression", "is_left_out"),
    [
        ("rig", FAST, True),
        ("tmp_path", FAST, False),
        ("rig", "not engines", False),
        ("tmp_path", "engines", False),  # A case of a parametrised test may have the mark.
        ("tmp_path", "", False),
    ],
)
def test_files_without_a_chosen_test_are_left_out(
    taken: str, expression: str, is_left_out: bool, tmp_path: Path
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(SOURCE.format(taken=taken))
    assert marks.leaves_out(expression, file) == is_left_out


@pytest.mark.slow
def test_collecting_the_fast_tests_imports_no_engine() -> None:
    """These imports take longer than the fast tests."""
    code = (
        f"import pytest, sys; pytest.main(['--co', '-qq', '-n', '0', '-m', {FAST!r}, 'tests']); "
        "print('imported:', {'megatron', 'vllm', 'transformers', 'peft'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=300)
    assert run.stdout.endswith("imported: set()\n"), run.stdout[-2000:] + run.stderr
