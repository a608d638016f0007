"""Automatic marks: a test is marked by the fixtures that it takes, and fails if it starts ranks
without the mark.

A test that takes the fixture `ranks` or `engines` gets the mark of that name. A test that starts
programs (torchrun, `run_ranks`) carries `@pytest.mark.ranks` itself. `engines` implies `ranks`, so
that `-m "not ranks"` starts no ranks at all.

If `-m` deselects every test of a file, the file is not even imported: imports of Megatron, vLLM and
transformers take longer than the fast tests. Modules that import one of these at the top are
therefore marked `slow`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

_IMPLIED = {"engines": ("engines", "ranks"), "ranks": ("ranks",)}
_NAMES = ("faults", "long", "ranks", "engines", "gpu", "slow")
_SLOW = (
    "hybrid_engine/attaching",
    *(
        f"hybrid_engine/{part}/{engine}"
        for part in ("backends", "trainer")
        for engine in ("fsdp", "megatron")
    ),
    "hybrid_engine/megatron_script/test_script_settings.py",
    "hybrid_engine/models/test_derived.py",
    "hybrid_engine/test_model_engine.py",
    "hybrid_engine/test_sent_tensors.py",
    "hybrid_engine/trainer/test_checkpoint_directory.py",
    "megatron_patches",
    # These start programs, plot, plan whole jobs, or step through hostile files or a switch.
    "examples/test_report.py",
    "examples/test_start.py",
    "hybrid_engine/tools/cli/test_plan_command.py",
    "hybrid_engine/files/test_documents.py",
    "hybrid_engine/planning/test_one_planner.py",
    "hybrid_engine/ranks/test_forks.py",
    "hybrid_engine/switch/test_interrupts.py",
    "offline",
)
"""Files and folders below tests/ marked `slow`: heavy imports at the top, or slow tests."""

_TESTS = Path(__file__).resolve().parents[1]

_test_without_ranks: str | None = None


def _implied(names: Iterable[str]) -> set[str]:
    return {implied for name in set(names) & set(_IMPLIED) for implied in _IMPLIED[name]}


def add_implied(item: pytest.Item) -> None:
    names = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    for name in sorted(_implied(names) | _of_place(item.path)):
        item.add_marker(name)


@functools.cache
def _of_place(path: Path) -> frozenset[str]:
    place = path.relative_to(_TESTS) if path.is_relative_to(_TESTS) else path
    return frozenset({"slow"} if any(place.is_relative_to(slow) for slow in _SLOW) else ())


def leaves_out(expression: str, path: Path) -> bool:
    """Return whether `-m expression` deselects every test of a file, judged by its source."""
    if not (path.name.startswith("test_") and path.suffix == ".py" and expression):
        return False
    place = _of_place(path)
    return (bool(place) and _is_never_chosen(expression, place)) or all(
        _is_never_chosen(expression, marks | place)
        for marks in _marks_in(ast.parse(path.read_text()))
    )


@functools.cache
def _is_never_chosen(expression: str, marks: frozenset[str]) -> bool:
    """Return whether `expression` deselects every test that has at least `marks`."""
    others = [name for name in _NAMES if name not in marks]
    compiled = Expression.compile(expression)
    for count in range(len(others) + 1):
        for more in itertools.combinations(others, count):
            all_marks = marks.union(more)
            if compiled.evaluate(lambda name, all_marks=all_marks, **_: name in all_marks):
                return False
    return True


def _marks_in(tree: ast.Module) -> Iterator[frozenset[str]]:
    """Yield the marks of each test of a file: by itself, its class, its file and its fixtures."""
    file_marks = frozenset[str]()
    taken: dict[
        str, set[str]
    ] = {}  # Fixtures that each fixture of the file takes, also indirectly.
    for node in tree.body:
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets):
            file_marks = frozenset(_marks_named(node.value))
        elif isinstance(node, ast.FunctionDef) and any(
            "fixture" in ast.unparse(deco) for deco in node.decorator_list
        ):
            arguments = _arguments(node)
            taken[node.name] = arguments.union(*(taken.get(name, set()) for name in arguments))
    for node in tree.body:
        classes = [node] if isinstance(node, ast.ClassDef) else []
        for test in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test"):
                decorators = [deco for marked in [*classes, test] for deco in marked.decorator_list]
                marks = {mark for decorator in decorators for mark in _marks_named(decorator)}
                fixtures = _arguments(test)
                fixtures = fixtures.union(*(taken.get(name, set()) for name in fixtures))
                yield file_marks | marks | _implied(fixtures | marks | file_marks)


def _marks_named(node: ast.expr) -> set[str]:
    """Return the marks in `pytest.mark.slow`, `on_ranks(2)` or a list of such.

    Those of parametrised cases do not count.
    """
    if isinstance(node, ast.List | ast.Tuple):
        return {mark for element in node.elts for mark in _marks_named(element)}
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return {name.removeprefix("pytest.mark.").removeprefix("on_")} & set(_NAMES)


def _arguments(node: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def running(item: pytest.Item) -> None:
    global _test_without_ranks
    _test_without_ranks = item.nodeid if item.get_closest_marker("ranks") is None else None


def install_guard() -> None:
    """Make a test without the mark `ranks` fail when it starts a rank as a program."""
    sys.addaudithook(_refuse_ranks)


def _refuse_ranks(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _test_without_ranks is not None:
        _, arguments, _, environment = args
        if _starts_ranks(arguments, environment or {}):
            raise AssertionError(f"{_test_without_ranks} starts ranks but is not marked `ranks`")


def _starts_ranks(arguments: Sequence[Any], environment: Mapping[Any, Any]) -> bool:
    return "torch.distributed.run" in arguments or "TORCHELASTIC_RUN_ID" in environment
