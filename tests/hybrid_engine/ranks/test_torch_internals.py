"""The private names of torch that the engine uses are those of the installed version."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.ranks.torch_internals import PRIVATE_NAMES, PrivateName, is_alive, storage_id
from tests.harness.private_names import exists


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
