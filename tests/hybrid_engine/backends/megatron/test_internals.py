"""The private names of megatron-core that the backend uses are those of the installed version."""

from __future__ import annotations

import megatron.core
import pytest
from packaging.version import Version

from hybrid_engine.backends.megatron.internals import PRIVATE_NAMES
from hybrid_engine.ranks.torch_internals import PrivateName
from megatron_patches.patch import CORE_VERSIONS
from tests.harness.private_names import exists

INSTALLED = Version(megatron.core.__version__)


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_the_installed_megatron_has_the_name(private: PrivateName) -> None:
    """An older one that is supported does without it."""
    is_there = not private.since or Version(private.since) <= INSTALLED
    assert exists(private) == is_there, private.reason


def test_names_came_with_a_supported_version() -> None:
    """Otherwise nothing would show that the backend works without them."""
    oldest, newest = Version(CORE_VERSIONS[0]), Version(CORE_VERSIONS[-1])
    assert all(oldest < Version(private.since) <= newest for private in PRIVATE_NAMES if private.since)
