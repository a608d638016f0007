"""`make compat`: take in new records, print the table, write docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Sequence

from compatibility import records
from compatibility.page import CELL_COLUMNS, LETTERS, RECORD_COLUMNS, cell_rows, page, record_rows
from hybrid_engine.cli.output import Console, new_table, writing
from hybrid_engine.files.durable import write_text

PAGE = records.REPO_ROOT / "docs" / "compatibility.md"


def main() -> None:
    """Records and page are written before anything is printed."""
    found = records.newest([*records.read(records.KEPT), *records.read(records.NEW)])
    with writing():
        records.keep(found)
        write_text(PAGE, page(found))
        _print(found)


def _print(found: Sequence[records.Record]) -> None:
    console = Console()
    table = new_table("Versions, and the run that shows it", *CELL_COLUMNS)
    before = ""
    for python, *rest in cell_rows(found):
        if before and python != before:
            table.add_section()
        table.add_row(python if python != before else "", *(text.replace("[", "\\[") for text in rest))
        before = python
    console.print(table)
    for remark, letter in LETTERS.items():
        console.print(f"({letter}) {remark}", markup=False)
    runs = new_table("Runs", *RECORD_COLUMNS)
    for row in record_rows(found):
        runs.add_row(*row)
    console.print(runs)
    console.print(f"Written to {PAGE.relative_to(records.REPO_ROOT)}", markup=False)


if __name__ == "__main__":
    main()
