"""Output of a command's answer to a terminal, a file or a pipe that may be closed early."""

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
    """Show progress on stderr while the block runs, if stderr is a terminal.

    Yields a function that sets the description of the current step.
    """
    errors = console.Console(stderr=True)
    if not errors.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns,
        console=errors,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as display:
        task = display.add_task("starting", total=None)
        yield lambda step: display.update(task, description=step)


def write_answer(facts: object, show: Callable[[], None], *, as_json: bool) -> None:
    """Write `facts` as JSON, or call `show` to print them.

    If stdout cannot be written, the command ends with a message and status 2.
    """
    try:
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            show()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, needs no more. The command keeps its exit status.
        _discard_output()
    except (FileError, OSError) as error:
        if isinstance(error, FileError):
            problem = str(error)
        else:
            problem = f"writing the answer: {error.strerror or error}"
        _discard_output()
        typer.echo(problem, err=True)
        raise typer.Exit(2) from None


def _discard_output() -> None:
    """Redirect stdout to /dev/null: flushing the rest of its buffer at exit would fail again."""
    with open(os.devnull, "w") as null, suppress(OSError, ValueError):
        os.dup2(null.fileno(), sys.stdout.fileno())


class Console(console.Console):
    """A rich console that leaves a broken pipe to `write_answer`."""

    def on_broken_pipe(self) -> None:
        """Re-raise the current error; rich would end the command with status 1."""
        raise


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table; its first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
