"""``python -m megatron_patches list``: every patch and whether it is applied here."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megatron_patches.catalog import apply, default_groups, states
from megatron_patches.errors import MegatronPatchError
from megatron_patches.registry import PatchState

app = typer.Typer(help="The patches that this package puts on Megatron.", no_args_is_help=True)


@app.callback()
def _main() -> None:
    """Keeps `list` a subcommand."""


@app.command("list")
def list_patches(
    check: Annotated[bool, typer.Option(help="Apply the default groups first, to see that they fit.")] = True,
) -> None:
    """Print each patch: name, group and state, then its target and its reason."""
    if check:
        try:
            apply()
        except MegatronPatchError as error:
            Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
    console = Console(highlight=False)
    for state in states():
        patch = state.patch
        line = Text.assemble(
            (patch.name, "bold"),
            f"  [{patch.group}]  {_describe(state)}\n",
            (f"    {patch.target}\n", "cyan"),
            f"    {patch.reason}",
        )
        console.print(line, soft_wrap=True)


def _describe(state: PatchState) -> str:
    if not state.is_needed:
        return f"not needed before megatron-core {state.patch.since}"
    if state.num_sites:
        return f"applied at {state.num_sites} places" if state.num_sites > 1 else "applied"
    return "not applied" if state.patch.group in default_groups() else "not applied (not a default group here)"


if __name__ == "__main__":
    app(prog_name="python -m megatron_patches")
