"""The private names of megatron-core that the backend uses are those of the installed version."""

from __future__ import annotations

import megatron.core
import pytest
from packaging.version import Version

from hybrid_engine.backends.megatron.internals import INTERNALS
from hybrid_engine.ranks.torch_internals import Internal
from megatron_patches.patch import CORE_VERSIONS
from tests.harness.internals import exists

INSTALLED = Version(megatron.core.__version__)


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.target)
def test_the_installed_megatron_has_the_name(internal: Internal) -> None:
    """An older one that is supported does without it."""
    is_there = not internal.since or Version(internal.since) <= INSTALLED
    assert exists(internal) == is_there, internal.reason


def test_names_came_with_a_supported_version() -> None:
    """Otherwise nothing would show that the backend works without them."""
    oldest, newest = Version(CORE_VERSIONS[0]), Version(CORE_VERSIONS[-1])
    assert all(oldest < Version(internal.since) <= newest for internal in INTERNALS if internal.since)
