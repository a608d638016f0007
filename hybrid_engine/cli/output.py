"""Writing a command's answer to a terminal, a file or a pipe that may be closed early."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer
from rich import console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybrid_engine.errors import FileError


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that says what is being done: on stderr, for as long as it is done, where that is a terminal."""
    errors = console.Console(stderr=True)
    if not errors.is_terminal:
        yield lambda _: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False, redirect_stderr=False) as shown:
        task = shown.add_task("starting", total=None)
        yield lambda doing: shown.update(task, description=doing)


def write_answer(facts: object, show: Callable[[], None], *, as_json: bool) -> None:
    """Write the facts as JSON, or show them; end the command with a message and status 2 where that cannot be."""
    try:
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            show()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` does; the command's status stays its own
        _discard_output()
    except (FileError, OSError) as error:
        problem = str(error) if isinstance(error, FileError) else f"writing the answer: {error.strerror or error}"
        _discard_output()
        typer.echo(problem, err=True)
        raise typer.Exit(2) from None


def _discard_output() -> None:
    """Redirect stdout to nowhere: flushing the rest of its buffer when Python exits would fail again."""
    with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class Console(console.Console):
    """A rich console that leaves a broken pipe to `write_answer`."""

    def on_broken_pipe(self) -> None:
        """Re-raise the error that is being handled; rich would end the command with status 1."""
        raise


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table; its first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
