"""Marks that tell the truth: a test has them by what it takes, and what starts ranks in a test without them ends it.

A test that takes the fixture `ranks` or `engines` is marked so. One that starts programs (torchrun, `run_ranks`) says
it itself: `@pytest.mark.ranks`. `engines` implies `ranks`, so `-m "not ranks"` starts none at all.

A file is not even imported where `-m` leaves out all of its tests: imports of Megatron, vLLM and transformers take
longer than the tests without them. So what imports one of these at its top is `slow`.
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
    *(f"hybrid_engine/{part}/{engine}" for part in ("backends", "trainer") for engine in ("fsdp", "megatron")),
    "hybrid_engine/megatron_script/test_script_settings.py",
    "hybrid_engine/models/test_derived.py",
    "hybrid_engine/test_model_engine.py",
    "hybrid_engine/test_sent_tensors.py",
    "hybrid_engine/trainer/test_checkpoint_directory.py",
    "megatron_patches",
    # and what starts programs, draws, plans whole jobs, or goes through hostile files or a switch line by line
    "examples/test_report.py",
    "examples/test_start.py",
    "examples/test_stopping.py",
    "hybrid_engine/backends/huggingface/test_publishing.py",
    "hybrid_engine/tools/cli/test_plan_command.py",
    "hybrid_engine/files/test_documents.py",
    "hybrid_engine/planning/test_one_planner.py",
    "hybrid_engine/ranks/test_forks.py",
    "hybrid_engine/switch/test_interrupts.py",
    "hybrid_engine/tools/verify/test_golden.py",
    "offline",
    "test_gpu_checks.py",
)
"""Files and folders below tests/ whose tests are: they import Megatron, transformers or torch's checkpoints, or take
seconds."""

_TESTS = Path(__file__).resolve().parents[1]

_test_without_ranks: str | None = None


def _implied(names: Iterable[str]) -> set[str]:
    return {implied for given in set(names) & set(_IMPLIED) for implied in _IMPLIED[given]}


def add_implied(item: pytest.Item) -> None:
    names = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    for name in sorted(_implied(names) | _of_place(item.path)):
        item.add_marker(name)


@functools.cache
def _of_place(path: Path) -> frozenset[str]:
    place = path.relative_to(_TESTS) if path.is_relative_to(_TESTS) else path
    return frozenset({"slow"} if any(place.is_relative_to(slow) for slow in _SLOW) else ())


def leaves_out(expression: str, path: Path) -> bool:
    """Whether no test of a file can be chosen by `-m expression`, as far as its source tells."""
    if not (path.name.startswith("test_") and path.suffix == ".py" and expression):
        return False
    place = _of_place(path)
    return (bool(place) and _is_never_chosen(expression, place)) or all(
        _is_never_chosen(expression, marks | place) for marks in _marks_in(ast.parse(path.read_text()))
    )


@functools.cache
def _is_never_chosen(expression: str, marks: frozenset[str]) -> bool:
    """Not with these marks, whichever others a test has besides."""
    others = [name for name in _NAMES if name not in marks]
    sets = (marks.union(more) for count in range(len(others) + 1) for more in itertools.combinations(others, count))
    compiled = Expression.compile(expression)
    return not any(compiled.evaluate(lambda name, each=each, **_: name in each) for each in sets)


def _marks_in(tree: ast.Module) -> Iterator[frozenset[str]]:
    """Of each test of a file: those of the file, of its class, its own, and what its fixtures imply."""
    of_file = frozenset[str]()
    taken: dict[str, set[str]] = {}  # by the file's fixtures
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == "pytestmark" for each in node.targets
        ):
            of_file = frozenset(_marks_named(node.value))
        elif isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(each) for each in node.decorator_list):
            own = _arguments(node)
            taken[node.name] = own.union(*(taken.get(name, set()) for name in own))
    for node in tree.body:
        parents = [node] if isinstance(node, ast.ClassDef) else []
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
                marks = {mark for one in [*parents, each] for deco in one.decorator_list for mark in _marks_named(deco)}
                fixtures = _arguments(each)
                fixtures = fixtures.union(*(taken.get(name, set()) for name in fixtures))
                yield of_file | marks | _implied(fixtures | marks | of_file)


def _marks_named(node: ast.expr) -> set[str]:
    """Of `pytest.mark.slow`, or a list of such; those of single cases of a parametrised test do not count."""
    if isinstance(node, ast.List | ast.Tuple):
        return {mark for each in node.elts for mark in _marks_named(each)}
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return {name.removeprefix("pytest.mark.")} & set(_NAMES)


def _arguments(node: ast.FunctionDef) -> set[str]:
    return {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}


def running(item: pytest.Item) -> None:
    global _test_without_ranks
    _test_without_ranks = item.nodeid if item.get_closest_marker("ranks") is None else None


def install_guard() -> None:
    """Have every start of a rank as a program fail in a test that is not marked `ranks`."""
    sys.addaudithook(_refuse_ranks)


def _refuse_ranks(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _test_without_ranks is not None:
        _, arguments, _, environment = args
        if _starts_ranks(arguments, environment or {}):
            raise AssertionError(f"{_test_without_ranks} starts ranks and is not marked `ranks`")


def _starts_ranks(arguments: Sequence[Any], environment: Mapping[Any, Any]) -> bool:
    return "torch.distributed.run" in arguments or "TORCHELASTIC_RUN_ID" in environment
