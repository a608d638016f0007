"""Command line of the patches.

python -m megatron_patches list                            list the patches, and which are applied
python -m megatron_patches patch-source CHECKOUT           apply a set to a checkout, or --reverse
python -m megatron_patches pretrain_gpt.py [arguments]     run a Megatron-LM script with the option
                                                           --enable-resharding
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from megatron_patches import script
from megatron_patches.errors import MegatronPatchError
from megatron_patches.patch import Patch, apply, default_groups, is_applied, patches_of, release_of

logger = logging.getLogger(__name__)


def folder() -> Path:
    """Return the folder of all sets.

    It is inside the installed package, or at the top of a checkout of this project.
    """
    package = Path(__file__).resolve().parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run `path` as ``python path arguments`` would, with the patches of group "script".

    Without CUDA the CPU patches are applied also. Exits with a message, before the script starts,
    if the file or megatron.training is missing, or the patches do not support the version. If the
    script does not reshard, an unsupported version only causes a warning, and the script runs
    unpatched.
    """
    if not Path(path).is_file():
        sys.exit(f"{path}: no such file; usage: python -m megatron_patches SCRIPT [arguments]")
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    # Without its parent package `find_spec` of a submodule raises.
    packages = ("megatron", "megatron.training")
    if any(importlib.util.find_spec(package) is None for package in packages):
        sys.exit(
            f"{path}: megatron.training is missing, which the package megatron-core contains only "
            "since 0.17; run an entry script of a Megatron-LM checkout, or add the checkout to "
            "PYTHONPATH"
        )
    # Imported here, so that a missing dependency of it is reported by name.
    importlib.import_module("megatron.training")
    try:
        apply(("script",), allow_version=script.allows_version())
        script.apply_stand_ins()
    except MegatronPatchError as error:
        if script.is_enabled():
            script.refuse(error)
        logger.warning("%s; the script runs unpatched", error)
    runpy.run_path(path, run_name="__main__")


app = typer.Typer(
    help="Patches of this package for Megatron. With a script in place of a command: run that "
    "script of Megatron-LM, which then accepts --enable-resharding.",
    no_args_is_help=True,
)


@app.command("list")
def list_patches(
    check: Annotated[
        bool, typer.Option(help="Apply the default groups first, to check that they fit.")
    ] = True,
) -> None:
    """Print each patch with its name, group, state, target and reason."""
    if check:
        try:
            apply()
        except MegatronPatchError as error:
            _fail(error)
    console = Console(highlight=False)
    for patch in patches_of():
        line = Text.assemble(
            (patch.name, "bold"),
            f"  [{patch.group}]  {_state_of(patch)}\n",
            (f"    {patch.target}\n", "cyan"),
            f"    {patch.reason}",
        )
        console.print(line, soft_wrap=True)


@app.command("patch-source")
def patch_source(
    checkout: Annotated[Path, typer.Argument(help="Root of a clean git checkout of Megatron-LM.")],
    reverse: Annotated[bool, typer.Option("--reverse", help="Take the set off again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Patch forks, changed trees, and trees without git.")
    ] = False,
) -> None:
    """Apply the patch set for a Megatron-LM checkout, completely or not at all, without a commit.

    Exits with 1 and changes nothing if there is no set for the version, or a hunk does not fit.
    """
    # Through bash, because a wheel does not preserve the executable bit.
    command = ["bash", str(folder() / "apply.sh"), str(checkout)]
    if reverse:
        command.append("--reverse")
    if force:
        command.append("--force")
    raise typer.Exit(subprocess.run(command).returncode)


def _fail(error: MegatronPatchError) -> NoReturn:
    message = f"{type(error).__name__}: {error}"
    Console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1) from error


def _state_of(patch: Patch) -> str:
    core = sys.modules.get("megatron.core")
    if core is not None and not patch.is_needed_by(release_of(core.__version__)):
        spans = []
        if patch.since:
            spans.append(f"before megatron-core {patch.since}")
        if patch.until:
            spans.append(f"from megatron-core {patch.until}")
        return f"not needed {' and '.join(spans)}"
    if is_applied(patch):
        return "applied"
    if patch.group in default_groups():
        return "not applied"
    return "not applied (not a default group here)"


def main() -> None:
    """Run a script, or a command of this package."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    names = [str(registered.name) for registered in app.registered_commands]
    if command in names or command.startswith("-"):
        app(prog_name="python -m megatron_patches")
        return
    if not Path(command).is_file():
        matches = get_close_matches(command, names, 1)
        if matches:
            sys.exit(f"{command}: neither a command nor a script. Did you mean {matches[0]}?")
    run_script(command, sys.argv[2:])


if __name__ == "__main__":
    main()
