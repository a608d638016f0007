"""Fixture that reverts all patches before and after every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import megatron_patches


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    megatron_patches.revert()
    yield
    megatron_patches.revert()
