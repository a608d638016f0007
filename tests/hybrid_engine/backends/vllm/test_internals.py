"""Every internal name of vLLM's and torch's that the backend uses exists in the versions installed; it uses no other.

After an upgrade of vLLM this says what to look at first.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.backends.vllm import internals, patches
from hybrid_engine.backends.vllm.internals import Internal, Members

PACKAGE = Path(inspect.getfile(internals)).parent
PUBLIC = {"vllm.LLM", "vllm.ModelRegistry", "vllm.SamplingParams"}
"""What vLLM's package promises."""


def catalogue() -> list[Internal]:
    """All of internals.py, those in its tuples and tables too."""

    def found(value: Any) -> Iterator[Internal]:
        if isinstance(value, Internal):
            yield value
        elif isinstance(value, dict):
            yield from found(tuple(value.values()))
        elif isinstance(value, tuple):
            for part in value:
                yield from found(part)

    return [internal for value in vars(internals).values() for internal in found(value)]


@pytest.mark.parametrize("internal", catalogue(), ids=lambda internal: internal.target)
def test_each_name_exists_and_takes_what_is_passed(internal: Internal) -> None:
    assert internal.reason
    loaded = internal.load()
    if internal.parameters:
        assert set(internal.parameters) <= set(inspect.signature(loaded).parameters)


@pytest.mark.parametrize("members", internals.MEMBERS, ids=lambda members: members.owner)
def test_each_attribute_exists(members: Members) -> None:
    assert members.reason
    owner = Internal(members.owner, "").load()
    assert [name for name in members.names if not hasattr(owner, name) and name not in set_by_instances(owner)] == []


def set_by_instances(kind: type) -> set[str]:
    """Attributes that the methods of a class, or of one it inherits from, set on `self`; and annotated ones."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        if not base.__module__.startswith(("vllm", "torch")):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_the_kernels_that_are_named_exist() -> None:
    assert set(internals.LOADER_LAYOUT_KERNELS) <= {kernel.name for kernel in internals.MOE_BACKENDS.load()}


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.target)
def test_each_target_of_a_patch_exists(patch: patches.Patch) -> None:
    module, _, path = patch.target.partition(":")
    if path.startswith("environ["):
        return
    *owners, attribute = path.split(".")
    owner = Internal(":".join((module, ".".join(owners))), "").load()
    assert hasattr(owner, attribute) or attribute in set_by_instances(owner)
    assert patch.reason
    assert patch.remove_when
    assert patch.versions


def test_groups_are_made_with_the_parameters_that_are_passed() -> None:
    make_group = Internal("vllm.distributed.parallel_state:init_model_parallel_group", "").load()
    assert {"group_ranks", "use_message_queue_broadcaster"} <= set(inspect.signature(make_group).parameters)
    assert "sort_ranks" in inspect.signature(importlib.import_module("torch.distributed").new_group).parameters


def test_nothing_else_of_vllm_is_imported() -> None:
    others = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            others += [name for name in names if name.partition(".")[0] == "vllm" and name not in PUBLIC]
    assert others == []
