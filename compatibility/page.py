"""docs/compatibility.md: the table of versions, the runs that it stands on, and what differs between versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from compatibility.cells import NONE, OTHER, VLLMS, Cell, Remark, Status, requires_python, rows
from compatibility.records import RUNS, Record

LETTERS = dict(zip(Remark, "abcdefgh", strict=False))
CELL_COLUMNS = (
    "Python",
    "Megatron",
    *({NONE: "no vLLM", OTHER: "others"}.get(vllm, f"vLLM {vllm}") for vllm in VLLMS),
)
RECORD_COLUMNS = ("", "run", "Python", "torch", "Megatron", "vLLM", "passed", "failed", "skipped", "UTC", "commit")


def cell_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The table of cells as texts, one row of `CELL_COLUMNS` each."""
    return [
        (python, megatron or "none", *(_text(cell, records) for cell in cells))
        for python, megatron, cells in rows(records)
    ]


def record_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The runs, numbered, one row of `RECORD_COLUMNS` each; a note follows the commit."""
    return [
        (
            *(str(number), each.run, each.python, each.torch, each.megatron, each.vllm),
            *(str(count) for count in (each.passed, each.failed, each.skipped)),
            *(each.date, f"{each.commit}: {each.note}" if each.note else each.commit),
        )
        for number, each in enumerate(records, start=1)
    ]


def page(records: Sequence[Record]) -> str:
    """The whole page."""
    return (
        (Path(__file__).parent / "page_template.md")
        .read_text()
        .format(
            cells=_markdown(CELL_COLUMNS, cell_rows(records)),
            records=_markdown(RECORD_COLUMNS, record_rows(records)),
            remarks="\n".join(f"- ({letter}) {remark}" for remark, letter in LETTERS.items()),
            runs="\n".join(f"| `{run.command}` | {run.what} |" for run in RUNS.values()),
            python=str(requires_python()).removeprefix(">="),
        )
    )


def _text(cell: Cell, records: Sequence[Record]) -> str:
    """Status, number of the run that shows it, letter of the remark."""
    text = str(cell.status)
    if cell.record is not None:
        if cell.status == Status.FAILED:
            text = f"{cell.record.failed} failed"
        text += f" [{records.index(cell.record) + 1}]"
    return text + (f" ({LETTERS[cell.remark]})" if cell.remark else "")


def _markdown(columns: Sequence[str], table: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
