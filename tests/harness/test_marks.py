"""A collection of the fast tests imports no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.launch import REPO_ROOT

FAST = "not ranks and not slow"


@pytest.mark.slow
def test_collecting_the_fast_tests_imports_no_engine() -> None:
    """These imports take longer than the fast tests, which read models by transformers' classes."""
    code = (
        f"import pytest, sys; pytest.main(['--co', '-qq', '-n', '0', '-m', {FAST!r}, 'tests']); "
        "print('imported:', {'megatron', 'vllm', 'peft'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=300)
    assert run.stdout.endswith("imported: set()\n"), run.stdout[-2000:] + run.stderr
