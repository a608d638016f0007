"""Every error and every violation of the product has a stable code, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_engine import errors
from tests.harness.interface import constructed
from tests.harness.launch import REPO_ROOT

KEBAB_CASE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

# Names of `hybrid_engine.errors` that take `code=`; errors that list findings do not.
WITH_CODE = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type)
    and (value is errors.Violation or issubclass(value, errors.HybridEngineError))
    and not issubclass(value, errors._FindingsError)
}

# Paths in which every error has a code. Finished packages are added and never removed.
DONE = (
    "hybrid_engine/__init__.py",
    "hybrid_engine/assembly.py",
    "hybrid_engine/attaching",
    "hybrid_engine/backends/fsdp",
    "hybrid_engine/backends/huggingface",
    "hybrid_engine/backends/megatron",
    "hybrid_engine/backends/training_side.py",
    "hybrid_engine/backends/vllm",
    "hybrid_engine/config",
    "hybrid_engine/files",
    "hybrid_engine/hybrid_engine.py",
    "hybrid_engine/integrations",
    "hybrid_engine/layouts",
    "hybrid_engine/megatron_script",
    "hybrid_engine/memory",
    "hybrid_engine/messages.py",
    "hybrid_engine/models",
    "hybrid_engine/planning",
    "hybrid_engine/ranks",
    "hybrid_engine/records",
    "hybrid_engine/rl",
    "hybrid_engine/serving",
    "hybrid_engine/switch",
    "hybrid_engine/tools",
    "hybrid_engine/tracing.py",
    "hybrid_engine/trainer",
    "hybrid_engine/transports",
    "hybrid_engine/vllm_plugin.py",
)


def calls_without_code(path: Path) -> Iterator[str]:
    """Yield the line of each error or violation that is constructed without a literal code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or constructed(node) not in WITH_CODE:
            continue
        codes = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        # A rule passes on its own code, which is a literal where the rule is made.
        code = ast.unparse(codes[0]) if codes else ""
        if code != "self.code" and not KEBAB_CASE.fullmatch(code.strip("'")):
            yield f"{path.relative_to(REPO_ROOT)}:{node.lineno}: {constructed(node)}"


@pytest.mark.parametrize("package", DONE)
def test_errors_have_codes(package: str) -> None:
    path = REPO_ROOT / package
    paths = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert paths
    assert [call for source in paths for call in calls_without_code(source)] == []
