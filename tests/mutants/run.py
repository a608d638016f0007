"""Judge whether tests notice changes of the engine's code: `make test-mutants`.

    python -m tests.mutants.run [--only TEXT] [--kind hand|syntax]

The third-party modules are imported once; each mutant is a fork of this process that runs the tests
of its folder, in process only, and stops at the first failure. The changed module exists in that
fork's memory alone, so the checkout stays as it is. Mutants by hand are in `by_hand.toml`; the
automatic ones change a comparison, an operator, a constant or a statement of the files named there.

Fails if a mutant by hand survives that must not, if one cannot be applied any more, or if fewer of
the automatic ones are killed than the recorded floor.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
ENGINE = REPO_ROOT / "hybrid_engine"
TABLE = Path(__file__).with_name("by_hand.toml")
PASSED = 0
VERDICTS = {PASSED: "survives", 1: "killed", 2: "killed", -signal.SIGKILL: "killed"}
"""By exit status of pytest: 2 if tests cannot be imported; killed after the timeout."""
FAULTS = ("survives", "cannot be judged")
PYTEST = ("-q", "-x", "--tb=line", "--no-header", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist")
FIRST_TIMEOUT = 1000.0
SLOWEST = 5  # times the seconds of unchanged code, after which a mutant counts as killed
GRACE = 20.0  # seconds more, for a busy machine

OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
}
"""Operator -> the operator that takes its place."""


@dataclass(frozen=True)
class Mutant:
    """A changed module of the engine.

    Attributes:
        name: identifies the mutant in the output.
        path: of the module.
        code: its changed text or syntax tree; None for the unchanged code, or if `old` is not there.
        folder: folder of the table whose tests judge it.
        survives: why it may survive; "" if tests must kill it.
    """

    name: str
    path: Path
    code: str | ast.Module | None
    folder: str
    survives: str = ""


def by_hand(folder: str, rows: list[dict[str, str]]) -> Iterator[Mutant]:
    for row in rows:
        path = ENGINE / folder / row["file"]
        text = path.read_text()
        code = text.replace(row["old"], row["new"]) if text.count(row["old"]) == 1 else None
        yield Mutant(f"{row['id']} {folder}/{row['file']}", path, code, folder, row.get("survives", ""))


def by_syntax(path: Path, folder: str, number: int) -> Iterator[Mutant]:
    """Yield up to `number` mutants, evenly spread over the functions of a file."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node): node for function in functions for body in function.body for node in ast.walk(body)}
    changeable = [node for node in inside.values() if _changed(node) is not None]
    for position in range(0, len(changeable), max(1, -(-len(changeable) // number))):
        node = changeable[position]
        change = _Change(node)
        mutated = ast.fix_missing_locations(change.visit(copy.deepcopy(tree, {id(node): node})))
        place = f"{path.relative_to(ENGINE)}:{node.lineno}"
        yield Mutant(f"{place} {ast.unparse(node).splitlines()[0][:70]}", path, mutated, folder)


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
        case ast.BinOp() if type(node.op) in OTHERS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
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


def run_tests(mutant: Mutant, tests: list[str], marks: str, seconds: float) -> tuple[int, str]:
    """Run tests in a fork of this process with the changed module; return their status and output.

    The status is that of pytest, or HANGS after `seconds`.
    """
    module = ".".join(mutant.path.relative_to(REPO_ROOT).with_suffix("").parts)
    assert module not in sys.modules, f"{module} was imported before it could change"
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            status = 99
            try:
                os.setsid()
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(output.fileno(), stream.fileno())
                _install(mutant)
                status = pytest.main([*PYTEST, "-m", marks, *tests])
                sys.stdout.flush()
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


def _install(mutant: Mutant) -> None:
    """Make the import of the mutant's module run the changed code."""
    get_code = SourceFileLoader.get_code

    def get_changed_code(loader: SourceFileLoader, name: str) -> Any:
        if mutant.code is not None and loader.path == str(mutant.path):
            return compile(mutant.code, loader.path, "exec", dont_inherit=True)
        return get_code(loader, name)

    SourceFileLoader.get_code = get_changed_code


def judge(mutants: list[Mutant], tests: list[str], marks: str) -> Counter[str]:
    """Run the tests over each mutant of a folder and print the verdicts; return their number.

    The tests must pass over unchanged code, which also says how long they may take.
    """
    start = time.monotonic()
    status, output = run_tests(dataclasses.replace(mutants[0], code=None), tests, marks, FIRST_TIMEOUT)
    seconds = time.monotonic() - start
    assert status == PASSED, f"without a mutant:\n{output}"
    print(f"{mutants[0].folder}: unchanged code takes {seconds:.1f} s", flush=True)
    verdicts = Counter[str]()
    for mutant in mutants:
        start = time.monotonic()
        status = None
        failed = ""
        if mutant.code is not None:
            status, output = run_tests(mutant, tests, marks, SLOWEST * seconds + GRACE)
            failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR "))), "")
        verdict = VERDICTS.get(status, "cannot be judged")
        if verdict == "survives":
            verdict = "may survive" if mutant.survives else verdict
        elif verdict == "killed" and mutant.survives:
            verdict = "killed, though it may survive"
        verdicts[verdict] += 1
        print(f"  {time.monotonic() - start:5.1f} s  {verdict}: {mutant.name}  {failed[:160]}", flush=True)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="judge mutants whose name contains this text")
    parser.add_argument("--kind", choices=("hand", "syntax"), help="judge only these; default: both")
    options = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    syntax = table.pop("syntax")
    preload()
    totals = {"hand": Counter[str](), "syntax": Counter[str]()}
    for folder, of_folder in table.items():
        kinds = {
            "hand": [*by_hand(folder, of_folder["mutants"])],
            "syntax": [
                mutant
                for name, number in syntax["files"].items()
                if name.startswith(f"{folder}/")
                for mutant in by_syntax(ENGINE / name, folder, number)
            ],
        }
        tests = [str(REPO_ROOT / "tests" / "hybrid_engine" / name) for name in of_folder["tests"]]
        marks = "not ranks" if of_folder.get("slow") else "not ranks and not slow"
        for kind, mutants in kinds.items():
            chosen = [mutant for mutant in mutants if options.only in mutant.name and options.kind in (None, kind)]
            if chosen:
                totals[kind] += judge(chosen, tests, marks)
    for kind, verdicts in totals.items():
        print(f"{kind}: {dict(verdicts)}")
    faults = [f"{count} mutants by hand: {verdict}" for verdict, count in totals["hand"].items() if verdict in FAULTS]
    by_kind = totals["syntax"]
    if by_kind["killed"] < syntax["floor"] * by_kind.total():
        faults.append(
            f"{by_kind['killed']} of {by_kind.total()} by syntax killed, at least {syntax['floor']:.0%} must be"
        )
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
