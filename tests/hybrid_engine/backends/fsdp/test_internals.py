"""The names that the backend uses and nobody promises are those of the installed versions."""

from __future__ import annotations

import pytest

from hybrid_engine.backends.fsdp.internals import PRIVATE_NAMES
from hybrid_engine.ranks.torch_internals import PrivateName
from tests.harness.private_names import exists


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_the_installed_versions_have_the_name(private: PrivateName) -> None:
    assert exists(private), private.reason
