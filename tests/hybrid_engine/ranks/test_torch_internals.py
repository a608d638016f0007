"""The private names of torch that the engine uses are those of the installed version."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.ranks.torch_internals import PRIVATE_NAMES, PrivateName, is_alive, storage_id, torch_defaults
from tests.harness.private_names import exists
from tests.harness.torch_modes import other_torch_modes


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_the_installed_torch_has_the_name(private: PrivateName) -> None:
    assert exists(private), private.reason


@pytest.mark.parametrize("target", ["torch:nothing", "torch.no_module:name", "torch.nn:Linear.nothing"])
def test_a_name_that_is_gone_is_noticed(target: str) -> None:
    assert not exists(PrivateName(target, "a test"))


def test_storages_are_told_apart_without_memory() -> None:
    one, other = (torch.zeros(4).untyped_storage() for _ in range(2))
    view = torch.empty(0).set_(one)
    for storage in (one, other):
        storage.resize_(0)
    assert storage_id(view.untyped_storage()) == storage_id(one) != storage_id(other)


def test_no_group_is_not_alive() -> None:
    assert not is_alive(None)


@torch_defaults()
def product() -> torch.Tensor:
    return torch.full((2, 2), 1.001) @ torch.ones(2, 2)


def test_modes_of_the_caller_are_suspended_and_come_back() -> None:
    expected = product()
    with other_torch_modes():
        for _ in range(2):
            found = product()
            assert found.dtype is torch.float32
            assert torch.equal(found, expected)
            assert not found.is_inference()
            outside = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
            assert outside.is_inference()
            assert outside.dtype is torch.ones(1).dtype is torch.bfloat16
    with torch.no_grad(), torch_defaults():
        assert not torch.is_grad_enabled()
