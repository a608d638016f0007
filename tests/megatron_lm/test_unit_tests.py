"""Megatron-LM's own unit tests end the same with our hooks as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron_lm.unit_tests import FILES, PATH_VARIABLE, by_ranks, checkout, of_file, passed, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs them on CPU; with CUDA, run them in Megatron-LM itself"),
]


@pytest.fixture
def source() -> Path:
    path = checkout()
    if path is None:
        pytest.skip(f"needs a checkout of Megatron-LM, named by {PATH_VARIABLE}")
    return path


@pytest.mark.parametrize(("num_ranks", "files"), by_ranks(FILES).items())
def test_the_same_tests_pass_with_hooks_as_without(source: Path, num_ranks: int, files: list[str]) -> None:
    without = run(source, files, num_ranks, ["cpu"])
    with_hooks = run(source, files, num_ranks, ["cpu", "hooks"])
    for file in files:
        assert passed(of_file(file, without)), f"nothing passed in {file}, so nothing was compared"
    assert passed(with_hooks) == passed(without)
    assert with_hooks.keys() == without.keys()
