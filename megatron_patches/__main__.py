"""The command line:

python -m megatron_patches list                            every patch and whether it is applied here
python -m megatron_patches pretrain_gpt.py [arguments]     a Megatron-LM script, which then knows --enable-resharding
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megatron_patches.applying import apply, default_groups, states
from megatron_patches.errors import MegatronPatchError
from megatron_patches.launcher import run_script
from megatron_patches.registry import PatchState

app = typer.Typer(
    help="The patches that this package applies to Megatron. With a script in place of a command: run that script of "
    "Megatron-LM, which then knows --enable-resharding.",
    no_args_is_help=True,
)


@app.callback()
def _main() -> None:
    """Keeps `list` a subcommand."""


@app.command("list")
def list_patches(
    check: Annotated[bool, typer.Option(help="Apply the default groups first, to check that they fit.")] = True,
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


def main() -> None:
    """Run a script, or a command of ours."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "list" or command.startswith("-"):
        app(prog_name="python -m megatron_patches")
    else:
        run_script(command, sys.argv[2:])


if __name__ == "__main__":
    main()
