"""The command line:

python -m megatron_patches list                            every patch and whether it is applied here
python -m megatron_patches sets                            patch sets for Megatron-LM checkouts, and where they are
python -m megatron_patches patch-source CHECKOUT           put the set of its version on a checkout (--reverse: off)
python -m megatron_patches pretrain_gpt.py [arguments]     a Megatron-LM script, which then knows --enable-resharding
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from megatron_patches.applying import PatchState, apply, default_groups, states
from megatron_patches.errors import MegatronPatchError
from megatron_patches.launcher import run_script
from megatron_patches.patch_sets import folder, patch_checkout, patch_sets

app = typer.Typer(
    help="The patches that this package applies to Megatron. With a script in place of a command: run that script of "
    "Megatron-LM, which then knows --enable-resharding.",
    no_args_is_help=True,
)


@app.command("list")
def list_patches(
    check: Annotated[bool, typer.Option(help="Apply the default groups first, to check that they fit.")] = True,
) -> None:
    """Print each patch: name, group and state, then its target and its reason."""
    if check:
        try:
            apply()
        except MegatronPatchError as error:
            _fail(error)
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


@app.command("sets")
def list_sets() -> None:
    """Print the patch sets for Megatron-LM checkouts: name, versions, upstream commit; first the folder of all."""
    print(folder())
    for each in patch_sets():
        print(f"{each.name}  for {', '.join(each.versions)}, made against {each.upstream}")


@app.command("patch-source")
def patch_source(
    checkout: Annotated[Path, typer.Argument(help="Root of a clean git checkout of Megatron-LM.")],
    reverse: Annotated[bool, typer.Option("--reverse", help="Take the set off again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Patch forks, changed trees, and trees without git.")] = False,
) -> None:
    """Put the patch set of its version on a Megatron-LM checkout, all of it or nothing. Nothing is committed.

    Exits with 1, and changes nothing, when there is no set for the version or a hunk does not fit.
    """
    raise typer.Exit(patch_checkout(checkout, reverse=reverse, force=force))


def _fail(error: MegatronPatchError) -> NoReturn:
    Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1) from error


def _describe(state: PatchState) -> str:
    if not state.is_needed:
        patch = state.patch
        spans = (("before", patch.since), ("from", patch.until))
        return "not needed " + " and ".join(f"{word} megatron-core {version}" for word, version in spans if version)
    if state.is_applied:
        return "applied"
    return "not applied" if state.patch.group in default_groups() else "not applied (not a default group here)"


def main() -> None:
    """Run a script, or a command of ours."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    names = [str(registered.name) for registered in app.registered_commands]
    if command in names or command.startswith("-"):
        app(prog_name="python -m megatron_patches")
    elif not Path(command).is_file() and (meant := get_close_matches(command, names, 1)):
        sys.exit(f"{command}: neither a command nor a script. Did you mean {meant[0]}?")
    else:
        run_script(command, sys.argv[2:])


if __name__ == "__main__":
    main()
