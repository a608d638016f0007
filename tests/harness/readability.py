"""Size and readability of each package, read from its sources and compared with recorded figures.

`tests/recorded/readability.json` holds the budget of each package. A figure may fall, and may rise
only in a commit that gives the reason:

    python -m tests.harness.readability            # prints the figures
    python -m tests.harness.readability --record   # writes them

Figures, all counts:
    lines       lines of the files
    nodes       expression nodes: how much there is to read, however it is broken into lines
    wide        lines beyond 100 columns
    pronouns    assigned names that do not describe the value, such as `found` or `told`
    tuples      assignments of several unlike values, `a, b = x, y`
    openings    docstrings that begin with a word such as What, Whether, One or Of
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
RECORDED = REPO_ROOT / "tests" / "recorded" / "readability.json"
PROGRAMS = ("hybrid_engine", "megatron_patches", "benchmarks", "examples", "tests")

MOST_COLUMNS = 100
PRONOUNS = frozenset(
    ["found", "each", "one", "own", "told", "given", "said", "asked", "beside", "made", "there"],
)
OPENINGS = frozenset(
    ["What", "Whether", "One", "Of", "All", "As", "Where", "That", "For", "In", "With"],
)


def packages() -> dict[str, list[Path]]:
    """Return the sources of each package: of hybrid_engine and tests, of each folder in them."""
    sources: dict[str, list[Path]] = {}
    for program in PROGRAMS:
        for path in sorted((REPO_ROOT / program).rglob("*.py")):
            parts = path.relative_to(REPO_ROOT).parts[:-1]
            depth = 2 if program in ("hybrid_engine", "tests") else 1
            sources.setdefault("/".join(parts[:depth]), []).append(path)
    return sources


def measure(paths: list[Path]) -> dict[str, int]:
    """Return the figures of the sources `paths` together."""
    figures = Counter(lines=0, nodes=0, wide=0, pronouns=0, tuples=0, openings=0)
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        figures["lines"] += len(lines)
        figures["wide"] += sum(len(line) > MOST_COLUMNS for line in lines)
        for node in ast.walk(ast.parse(text)):
            figures.update(_figures_of(node))
    return dict(figures)


def _figures_of(node: ast.AST) -> Counter[str]:
    figures = Counter[str]()
    if isinstance(node, ast.expr):
        figures["nodes"] += 1
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        figures["pronouns"] += node.id in PRONOUNS
    if isinstance(node, ast.arg):
        figures["pronouns"] += node.arg in PRONOUNS
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        figures["tuples"] += isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node) or ""
        first_word = docstring.split(maxsplit=1)[:1]
        figures["openings"] += bool(first_word) and first_word[0].rstrip(",:") in OPENINGS
    return figures


def measured() -> dict[str, dict[str, int]]:
    """Return the figures of every package."""
    return {package: measure(paths) for package, paths in packages().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the size and readability of each package.")
    parser.add_argument("--record", action="store_true", help="write the figures as budgets")
    options = parser.parse_args()
    figures = measured()
    rows = [f'  "{package}": {json.dumps(counts)}' for package, counts in sorted(figures.items())]
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    if options.record:
        RECORDED.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
