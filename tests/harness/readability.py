"""Size and readability of each room, read from the sources and compared with recorded figures.

A room is a package of hybrid_engine or tests, or another program. `make lint` fails if a figure of
a room is higher than recorded. The file is written anew by a command that refuses a higher sum over
the rooms of a side, so what one room gains, others lose in the same commit:

    python -m tests.harness.readability            # compare; the figures that are too high
    python -m tests.harness.readability --record   # write the figures and their sums

Figures, all counts:
    files       Python files
    functions   functions and methods, inner ones too
    nodes       expressions and statements of the syntax tree, however they are broken into lines
    wide        lines beyond 100 columns
    pronouns    assigned names that do not describe the value, such as `found` or `told`
    tuples      assignments of several unlike values, `a, b = x, y`
    openings    docstrings that begin with a word such as What, Whether, One or Of

In the product, a file has at most 700 lines, and a search for a class name finds one class.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
RECORDED = REPO_ROOT / "tests" / "recorded" / "readability.json"
SIDES = {
    "product": ("hybrid_engine", "megatron_patches"),
    "programs": ("benchmarks", "examples"),
    "tests": ("tests",),
}
FIGURES = ("files", "functions", "nodes", "wide", "pronouns", "tuples", "openings")

MAX_COLUMNS = 100
MAX_LINES = 700
PRONOUNS = frozenset(
    ["found", "each", "one", "own", "told", "given", "said", "asked", "beside", "made", "there"],
)
OPENINGS = frozenset(
    ["What", "Whether", "One", "Of", "All", "As", "Where", "That", "For", "In", "With"],
)

Figures = dict[str, Counter[str]]
"""Room or side -> figures."""


def measure(text: str, tree: ast.Module) -> Counter[str]:
    """Return the figures of a file."""
    figures = Counter(files=1, wide=sum(len(line) > MAX_COLUMNS for line in text.splitlines()))
    for node in ast.walk(tree):
        match node:
            case ast.expr_context() | ast.operator() | ast.cmpop():
                continue
            case ast.Name(ctx=ast.Store()):
                figures["pronouns"] += node.id in PRONOUNS
            case ast.arg():
                figures["pronouns"] += node.arg in PRONOUNS
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                figures["tuples"] += 1
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                figures["functions"] += not isinstance(node, ast.Module | ast.ClassDef)
                first_word = (ast.get_docstring(node, clean=False) or "").split(maxsplit=1)[:1]
                figures["openings"] += bool(first_word) and first_word[0].rstrip(",:") in OPENINGS
        figures["nodes"] += isinstance(node, ast.expr | ast.stmt)
    return figures


def measured() -> tuple[Figures, list[str]]:
    """Return the figures of every room, and the faults of single files of the product."""
    rooms: Figures = defaultdict(Counter)
    faults = []
    classes = defaultdict[str, list[str]](list)
    for program in (program for programs in SIDES.values() for program in programs):
        for path in sorted((REPO_ROOT / program).rglob("*.py")):
            name = path.relative_to(REPO_ROOT)
            text = path.read_text()
            tree = ast.parse(text)
            depth = 2 if program in ("hybrid_engine", "tests") else 1
            rooms["/".join(name.parts[:-1][:depth])] += measure(text, tree)
            if program in SIDES["product"]:
                if (num_lines := text.count("\n")) > MAX_LINES:
                    faults.append(f"{name} has {num_lines} lines, at most {MAX_LINES}: split it")
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        classes[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
    for name, places in classes.items():
        if len(places) > 1:
            faults.append(f"several classes are called {name}: {', '.join(places)}")
    return rooms, faults


def sums_of(rooms: Figures) -> Figures:
    """Return the figures of each side."""
    return {
        side: sum(
            (figures for room, figures in rooms.items() if room.split("/")[0] in programs),
            Counter(),
        )
        for side, programs in SIDES.items()
    }


def higher(figures: Figures, limits: Figures) -> Iterator[str]:
    """Yield the figures above their limits, as text."""
    for name, counts in figures.items():
        for figure in FIGURES:
            limit = limits.get(name, {}).get(figure, 0)
            if counts[figure] > limit:
                yield f"{name}: {figure} is {counts[figure]}, recorded {limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the size and readability of each room.")
    parser.add_argument("--record", action="store_true", help="write the figures")
    options = parser.parse_args()
    rooms, faults = measured()
    sums = sums_of(rooms)
    recorded = json.loads(RECORDED.read_text())
    faults += higher(sums, recorded["sums"])
    if options.record and not faults:
        parts = []
        for name, table in (("sums", sums), ("rooms", rooms)):
            rows = [
                f'    "{key}": {json.dumps({figure: counts[figure] for figure in FIGURES})}'
                for key, counts in sorted(table.items())
            ]
            parts.append(f'  "{name}": {{\n' + ",\n".join(rows) + "\n  }")
        RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    elif not options.record:
        faults += higher(rooms, recorded["rooms"])
    if faults:
        remedy = "Cut as much elsewhere, then record: python -m tests.harness.readability --record"
        sys.exit("\n".join([*faults, remedy]))


if __name__ == "__main__":
    main()
