"""The functions in which faults are injected exist; fault tests themselves run rarely."""

from __future__ import annotations

import functools
import importlib

import pytest

from tests.faults import test_failing_ranks, test_run_directory
from tests.faults.job import Fault

FAULTS: list[Fault] = [*test_failing_ranks.FAULTS, test_run_directory.UPDATE]


@pytest.mark.slow  # Imports vLLM.
@pytest.mark.parametrize("where", sorted({fault.where for fault in FAULTS}))
def test_the_function_exists(where: str) -> None:
    module, _, function = where.partition(":")
    assert callable(functools.reduce(getattr, function.split("."), importlib.import_module(module)))
