"""Judge whether tests notice changes of the engine's code: `make test-mutants`.

    python -m tests.mutants.run [--only TEXT] [--kind hand|syntax]

The third-party modules are imported once; each mutant is a fork of this process that runs the tests
of its folder, in process only, and stops at the first failure. The changed module exists in that
fork's memory alone, so the checkout stays as it is. The first fork of a folder notes which files of
tests enter which functions: a mutant is judged by those that enter the function it changes. Mutants
by hand are in `by_hand.toml`; those by syntax change a comparison, an operator, a constant or a
statement of the files named there.

Fails if a mutant by hand survives that must not, if one cannot be applied any more, or if fewer of
those by syntax are killed than the recorded floor.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
ENGINE = REPO_ROOT / "hybrid_engine"
TABLE = Path(__file__).with_name("by_hand.toml")
PASSED = 0
VERDICTS = {PASSED: "survives"}
VERDICTS |= dict.fromkeys((1, 2, -signal.SIGKILL, -signal.SIGSEGV), "killed")
"""By exit status of pytest: 2 if tests cannot be imported; SIGKILL ends it after the timeout."""
FAULTS = ("survives", "cannot be judged")
PYTEST = (
    "-q",
    "-x",
    "--tb=line",
    "--no-header",
    "-rfE",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
)
FIRST_TIMEOUT = 1000.0
SLOWEST = 5  # times the seconds of unchanged code, after which a mutant counts as killed
GRACE = 20.0  # seconds more, for a busy machine

Changed = Mapping[Path, str | ast.Module]
"""Path of a module -> its changed text or syntax tree."""
Entered = tuple[str, str]
"""File of tests, or "" outside tests; path of a module and line of a function in it."""

OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.And: ast.Or,
        ast.Or: ast.And,
    },
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.FloorDiv: ast.Mult,
        ast.Mod: ast.Mult,
    },
}
"""Operator -> the operator that takes its place."""


@dataclass(frozen=True)
class Mutant:
    """A changed module of the engine.

    Attributes:
        kind: "hand" or "syntax".
        name: identifies the mutant in the output.
        path: of the module.
        code: its changed text or syntax tree; None if `old` is not there.
        line: first line that may differ.
        survives: why it may survive; "" if tests must kill it.
    """

    kind: str
    name: str
    path: Path
    code: str | ast.Module | None
    line: int
    survives: str = ""


def by_hand(folder: str, rows: list[dict[str, str]]) -> Iterator[Mutant]:
    for row in rows:
        path = ENGINE / folder / row["file"]
        text = path.read_text()
        before, *after = text.split(row["old"])
        code = row["new"].join([before, *after]) if len(after) == 1 else None
        line = 1 + before.count("\n")
        yield Mutant(
            "hand", f"{row['id']} {folder}/{row['file']}", path, code, line, row.get("survives", "")
        )


def by_syntax(path: Path, number: int) -> Iterator[Mutant]:
    """Yield up to `number` mutants, evenly spread over the functions of a file."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node): node
        for function in _functions(tree)
        for body in function.body
        for node in ast.walk(body)
    }
    changeable = [node for node in inside.values() if _changed(node) is not None]
    for position in range(0, len(changeable), max(1, -(-len(changeable) // number))):
        node = changeable[position]
        change = _Change(node)
        mutated = ast.fix_missing_locations(change.visit(copy.deepcopy(tree, {id(node): node})))
        place = f"{path.relative_to(ENGINE)}:{node.lineno}"
        yield Mutant(
            "syntax",
            f"{place} {ast.unparse(node).splitlines()[0][:70]}",
            path,
            mutated,
            node.lineno,
        )


class _Change(ast.NodeTransformer):
    def __init__(self, node: ast.AST) -> None:
        self._node = node

    def visit(self, node: ast.AST) -> ast.AST:
        return _changed(node) if node is self._node else self.generic_visit(node)


def _changed(node: ast.AST) -> ast.AST | None:
    """Return the node that takes the place of `node`; None for a node that stays."""
    match node:
        case ast.Compare(ops=[operator]):
            new = ast.Compare(node.left, [OTHERS[type(operator)]()], node.comparators)
        case ast.BoolOp():
            new = ast.BoolOp(OTHERS[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            new = node.operand
        case ast.BinOp() if type(node.op) in OTHERS and not isinstance(
            node.left, ast.Constant | ast.JoinedStr
        ):
            new = ast.BinOp(node.left, OTHERS[type(node.op)](), node.right)
        case ast.Constant(value=bool() as value):
            new = ast.Constant(not value)
        case ast.Constant(value=int() as value):
            new = ast.Constant(value + 1)
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call()):
            new = ast.Pass()
        case ast.If():
            new = ast.If(ast.Constant(False), node.body, node.orelse)
        case _:
            return None
    return ast.copy_location(new, node)


def preload() -> None:
    """Import what tests import from other packages, but no module of the engine that may change."""
    sys.dont_write_bytecode = True
    import tests.conftest  # noqa: F401 - sets the environment first
    from tests.harness.launch import PRELOADED

    for name in (
        *PRELOADED,
        "hypothesis.strategies",
        "typer",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
    ):
        if not name.startswith(("hybrid_engine", "tests")):
            importlib.import_module(name)
    # A traceback looks for its frames in all modules, and remembers them.
    inspect.getmodule(inspect.currentframe())


def run_tests(changed: Changed, tests: list[str], marks: str, seconds: float) -> tuple[int, str]:
    """Run tests in a fork of this process with changed modules; return their status and output.

    The status is that of pytest, or of the signal that ended it after `seconds`. The last line of
    the output lists what called `_entered`.
    """
    for path in changed:
        module = ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts)
        assert module not in sys.modules, f"{module} was imported before it could change"
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            status = 99
            try:
                os.setsid()
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(output.fileno(), stream.fileno())
                entered = _install(changed)
                status = pytest.main([*PYTEST, "-m", marks, *tests])
                print(json.dumps([*entered]), flush=True)
            finally:
                os._exit(status)
        deadline = time.monotonic() + seconds
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # also what the tests have left
            os.killpg(pid, signal.SIGKILL)
        status = ended[1] if ended[0] else os.waitpid(pid, 0)[1]
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def _install(changed: Changed) -> dict[Entered, None]:
    """Make imports run the changed code; return what `_entered` is given, in order."""
    get_code = SourceFileLoader.get_code
    entered = dict[Entered, None]()

    def get_changed_code(loader: SourceFileLoader, name: str) -> Any:
        code = changed.get(Path(loader.path))
        if code is None:
            return get_code(loader, name)
        return compile(code, loader.path, "exec", dont_inherit=True)

    def note(place: str) -> None:
        entered[os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0], place] = None

    SourceFileLoader.get_code = get_changed_code
    builtins._entered = note
    return entered


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def noting(path: Path) -> ast.Module:
    """Return the module with a call of `_entered` in each function."""
    tree = ast.parse(path.read_text())
    for function in _functions(tree):
        start = 0 if ast.get_docstring(function) is None else 1
        place = f"{path}:{function.lineno}"
        function.body[start:start] = ast.parse(f"_entered({place!r})").body
    return ast.fix_missing_locations(tree)


def files_that_enter(mutant: Mutant, entered: list[Entered]) -> list[str] | None:
    """Return the files of tests that enter the changed function; None if any may."""
    functions = _functions(ast.parse(mutant.path.read_text()))
    lines = [node.lineno for node in functions if node.lineno <= mutant.line <= node.end_lineno]
    if not lines:
        return None
    # The innermost function begins last.
    files = [file for file, place in entered if place == f"{mutant.path}:{max(lines)}"]
    return None if "" in files else files


def judge(folder: str, mutants: list[Mutant], tests: list[str], marks: str) -> Counter[str]:
    """Run tests over each mutant of a folder and print the verdicts; return their number.

    The tests must pass over unchanged code, which also says how long they may take.
    """
    start = time.monotonic()
    status, output = run_tests(
        {mutant.path: noting(mutant.path) for mutant in mutants}, tests, marks, FIRST_TIMEOUT
    )
    seconds = time.monotonic() - start
    assert status == PASSED, f"without a mutant:\n{output}"
    entered = json.loads(output.splitlines()[-1])
    print(f"{folder}: unchanged code takes {seconds:.1f} s", flush=True)
    verdicts = Counter[tuple[str, str]]()
    for mutant in mutants:
        start = time.monotonic()
        status = None
        failed = ""
        files = files_that_enter(mutant, entered)
        if mutant.code is not None and files == []:
            status = PASSED
        elif mutant.code is not None:
            status, output = run_tests(
                {mutant.path: mutant.code}, files or tests, marks, SLOWEST * seconds + GRACE
            )
            failed = next(
                (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR "))), ""
            )
        verdict = VERDICTS.get(status, "cannot be judged")
        if verdict == "survives":
            verdict = "may survive" if mutant.survives else verdict
        elif verdict == "killed" and mutant.survives:
            verdict = "killed, though it may survive"
        verdicts[mutant.kind, verdict] += 1
        print(
            f"  {time.monotonic() - start:5.1f} s  {verdict}: {mutant.name}  {failed[:160]}",
            flush=True,
        )
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="judge mutants whose name contains this text")
    parser.add_argument(
        "--kind", default="", choices=("hand", "syntax"), help="judge only these; default: both"
    )
    options = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    syntax = table.pop("syntax")
    preload()
    verdicts = Counter[tuple[str, str]]()
    for folder, of_folder in table.items():
        mutants = [*by_hand(folder, of_folder["mutants"])]
        for name, number in syntax["files"].items():
            if name.startswith(f"{folder}/"):
                mutants += by_syntax(ENGINE / name, number)
        chosen = [
            mutant
            for mutant in mutants
            if options.only in mutant.name and options.kind in ("", mutant.kind)
        ]
        tests = [str(REPO_ROOT / "tests" / "hybrid_engine" / name) for name in of_folder["tests"]]
        if chosen:
            verdicts += judge(
                folder,
                chosen,
                tests,
                "not ranks" if of_folder.get("slow") else "not ranks and not slow",
            )
    for kind, verdict in sorted(verdicts):
        print(f"{kind}: {verdicts[kind, verdict]} {verdict}")
    faults = [
        f"{verdicts['hand', fault]} mutants by hand: {fault}"
        for fault in FAULTS
        if verdicts["hand", fault]
    ]
    killed = verdicts["syntax", "killed"]
    number = killed + sum(verdicts["syntax", fault] for fault in FAULTS)
    if killed < syntax["floor"] * number:
        faults.append(
            f"{killed} of {number} by syntax killed, at least {syntax['floor']:.0%} must be"
        )
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
