"""A collection of the fast tests imports no engine."""

from __future__ import annotations

import pytest

from tests.hybrid_engine.tools.programs import run_python

FAST = "not ranks and not slow"


@pytest.mark.slow
def test_collecting_the_fast_tests_imports_no_engine() -> None:
    """These imports take longer than the fast tests, which read models by transformers' classes."""
    code = (
        f"import pytest, sys; pytest.main(['--co', '-qq', '-n', '0', '-m', {FAST!r}, 'tests']); "
        "print('imported:', {'megatron', 'vllm', 'peft'} & set(sys.modules))"
    )
    run = run_python("-c", code, timeout=300)
    assert run.stdout.endswith("imported: set()\n"), run.stdout[-2000:] + run.stderr
