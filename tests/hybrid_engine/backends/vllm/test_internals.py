"""Every internal name of vLLM's and torch's that the backend uses exists in the versions installed; it uses no other.

After an upgrade of vLLM this says what to look at first.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.internals import READ, READ_FROM_LLM, Internal, Patch
from hybrid_engine.backends.vllm.surface.uses import internal_names
from hybrid_engine.errors import DependencyError

pytestmark = pytest.mark.slow  # imports vLLM

PACKAGE = Path(inspect.getfile(internals)).parent


RECORDS = list(internal_names())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.target)
def test_each_name_exists_and_takes_what_is_passed_by_name(record: Internal) -> None:
    loaded = record.load()
    if record.keywords:
        assert set(record.keywords) <= set(inspect.signature(loaded).parameters)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.target)
def test_each_name_has_its_reason(record: Internal) -> None:
    assert record.reason
    if isinstance(record, Patch):
        assert record.remove_when


@pytest.mark.parametrize(
    ("owner", "names"),
    [pytest.param(owner, names, id=owner) for owners in READ.values() for owner, names in owners.items()],
)
def test_each_attribute_exists(owner: str, names: tuple[str, ...]) -> None:
    found = Internal(owner, "").load()
    assert [name for name in names if not has(found, name)] == []


def has(owner: Any, name: str) -> bool:
    """Whether a module or a class has it, or the objects of the class."""
    return hasattr(owner, name) or (isinstance(owner, type) and name in set_by_objects(owner))


def set_by_objects(kind: type) -> set[str]:
    """Attributes that a class, or one it inherits from, annotates, or that its methods set on `self`."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        names |= {
            node.target.id
            for node in definition.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        names |= {
            node.attr
            for node in ast.walk(definition)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
    return names


class Thing:
    """What the search below has to tell apart."""

    annotated: int

    def __init__(self, other: Any) -> None:
        self.own: int = 0
        other.foreign = 0
        local: int = self.read
        self.own = local


class Inherits(Thing):
    pass


@pytest.mark.parametrize("kind", [Thing, Inherits])
def test_only_what_an_object_has_is_found(kind: type) -> None:
    names = ("annotated", "own", "__init__", "foreign", "local", "read", "other")
    assert [name for name in names if has(kind, name)] == ["annotated", "own", "__init__"]


def engine_with(paths: Iterable[str]) -> SimpleNamespace:
    """An object with these attributes of attributes."""
    llm = SimpleNamespace()
    for path in paths:
        at = llm
        for name in path.split("|")[0].split("."):
            at = vars(at).setdefault(name, SimpleNamespace())
    return llm


def test_an_engine_of_other_classes_is_refused_with_all_that_it_lacks() -> None:
    internals.require_readable(engine_with(READ_FROM_LLM))
    llm = engine_with(path for path in READ_FROM_LLM if not path.endswith(("request_states", "execute_model_state")))
    missing = r"no SimpleNamespace\.execute_model_state, .*request_states, .*sleep_mode_backend"
    with pytest.raises(DependencyError, match=missing):
        internals.require_readable(llm, "sleep_mode_backend.suspend")


def test_only_what_vllm_exports_is_imported_past_the_list() -> None:
    others = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                others += [alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                exported = importlib.import_module(node.module).__all__
                others += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in exported]
    assert others == []
