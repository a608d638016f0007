"""The versions that are pinned have the faults of other projects that are worked around here.

When a program of patches/upstream finds its fault no more, the work-around and its folder can go.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.models.test_megatron_bridge import INSTALL
from tests.hybrid_engine.tools.programs import run_python

UPSTREAM = REPO_ROOT / "patches" / "upstream"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [path.name for path in sorted(UPSTREAM.iterdir())])
def test_the_pinned_version_has_the_fault(name: str) -> None:
    if "bridge" in name and find_spec("megatron.bridge") is None:
        pytest.skip(INSTALL)
    run = run_python(UPSTREAM / name / "reproduce.py", status=1, timeout=300)
    assert "Traceback" not in run.stderr, run.stderr
