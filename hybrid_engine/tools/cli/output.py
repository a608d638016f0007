"""Output of a command's answer to a terminal, a file or a pipe that may be closed early.

An answer is printed from blocks, as lines and frames of a terminal or as Markdown:

    table      a heading, names of columns, and rows
    mapping    lines that begin with a heading
    text       a line, or several to copy
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import typer
from rich import console
from rich.table import Table
from rich.text import Text

Block = str | Mapping[str, str] | Table
_STYLES = {"Fits": "bold green", "Tight": "bold yellow", "Does not fit": "bold red"}
"""Heading of a verdict -> its style; others are bold."""


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Show on stderr that a long step runs, and its seconds at its end, in a file as well."""
    started = time.monotonic()
    terminal = Console(stderr=True)
    with terminal.status(step):
        if not terminal.is_terminal:
            typer.echo(f"{step} ...", err=True)
        yield
    typer.echo(f"{step} in {time.monotonic() - started:.0f} s", err=True)


def end_without_answer(error: str, status: int, as_json: bool, **facts: object) -> NoReturn:
    """End the command with an error on stderr and, with facts about it, as JSON on stdout."""
    typer.echo(error, err=True)
    write_answer({"error": error, **facts}, (), as_json=as_json)
    raise typer.Exit(status)


def write_answer(
    facts: object,
    blocks: Iterable[Block],
    *,
    as_json: bool,
    as_markdown: bool = False,
) -> None:
    """Write `facts` as JSON, or `blocks` for a reader.

    If stdout cannot be written, the command ends with a message and status 2.
    """
    try:
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            for block in blocks:
                if as_markdown:
                    typer.echo(_markdown(block))
                else:
                    _show(block)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, needs no more. The command keeps its exit status.
        _discard_output()
    except OSError as error:
        _discard_output()
        typer.echo(f"writing the answer: {error.strerror or error}", err=True)
        raise typer.Exit(2) from None


def _discard_output() -> None:
    """Redirect stdout to /dev/null: flushing the rest of its buffer at exit would fail again."""
    with open(os.devnull, "w") as null, suppress(OSError, ValueError):
        os.dup2(null.fileno(), sys.stdout.fileno())


def _markdown(block: Block) -> str:
    """Return a block as Markdown of GitHub, with an empty line after it; a table folded."""
    if isinstance(block, Table):
        columns = [[str(column.header), ":-", *column.cells] for column in block.columns]
        for column in columns[1:]:
            column[1] = "-:"
        lines = [f"| {' | '.join(map(str, row))} |" for row in zip(*columns, strict=True)]
        title = f"<details><summary>{block.title}</summary>"
        return "\n".join((title, "", *lines, "", "</details>", ""))
    if isinstance(block, Mapping):
        return "".join(f"- **{heading}**: {text}\n" for heading, text in block.items())
    return f"```\n{block}\n```\n" if "\n" in block else f"{block}\n"


def _show(block: Block) -> None:
    terminal = Console(highlight=False)
    if isinstance(block, str):
        # Lines to copy must not be broken.
        terminal.print(block, markup=False, soft_wrap="\n" in block)
    elif isinstance(block, Table):
        terminal.print(block)
    else:
        for heading, text in block.items():
            style = _STYLES.get(heading, "bold")
            terminal.print(Text.assemble((f"{heading}: ", style), text))


class Console(console.Console):
    """A rich console that leaves a broken pipe to `write_answer`."""

    def on_broken_pipe(self) -> None:
        """Re-raise the current error; rich would end the command with status 1."""
        raise


def new_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; its first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
