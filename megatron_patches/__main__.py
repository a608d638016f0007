"""The command line:

python -m megatron_patches list                            every patch and whether it is applied here
python -m megatron_patches sets                            patch sets for Megatron-LM checkouts, and where they are
python -m megatron_patches patch-source CHECKOUT           put the set of its version on a checkout (--reverse: off)
python -m megatron_patches pretrain_gpt.py [arguments]     a Megatron-LM script, which then knows --enable-resharding
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PatchSet:
    """One set: a quilt series.

    Attributes:
        directory: holds `series` and the patches that it names.
        upstream: tag and commit that the patches were made against.
        versions: what the trees that the set is for call themselves.
    """

    directory: Path
    upstream: str
    versions: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.directory.name


def folder() -> Path:
    """Return the folder of all sets."""
    return Path(__file__).resolve().parent / "patches"


def patch_sets() -> list[PatchSet]:
    """Return every set, by version."""
    found = []
    for series in sorted(folder().glob("core_v*/series")):
        heads = dict(re.findall(r"^# (upstream|version): (.+)$", series.read_text(), re.MULTILINE))
        found.append(PatchSet(series.parent, heads["upstream"], tuple(heads["version"].split())))
    return found


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run `path` as ``python path arguments`` would, with the patches of group "script" on megatron.training.

    Without CUDA also with those that let Megatron run on CPU. Exits with a message, before the script starts, if the
    file is missing, there is no megatron.training beside it, or the patches do not support its version. The last is a
    warning where the script does not reshard: then it runs as it is.
    """
    if not Path(path).is_file():
        sys.exit(f"{path}: no such file; usage: python -m megatron_patches SCRIPT [arguments]")
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        sys.exit(
            f"{path}: there is no megatron.training, which megatron-core's package has since 0.17 only; "
            "run an entry script of a Megatron-LM checkout, or add the checkout to PYTHONPATH"
        )
    importlib.import_module("megatron.training")  # if a dependency of it is missing, this says which
    try:
        apply(("script",), allow_version=script.allows_version())
        script.apply_stand_ins()
    except MegatronPatchError as error:
        if script.is_enabled():
            script.refuse(error)
        logger.warning("%s; the script runs as it is", error)
    runpy.run_path(path, run_name="__main__")


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
    for patch in patches_of():
        line = Text.assemble(
            (patch.name, "bold"),
            f"  [{patch.group}]  {_state_of(patch)}\n",
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
    flags = [flag for flag, given in (("--reverse", reverse), ("--force", force)) if given]
    # Through bash, for a wheel does not keep the bit that makes a file executable. It prints what it did, or why not.
    raise typer.Exit(subprocess.run(["bash", str(folder() / "apply.sh"), str(checkout), *flags]).returncode)


def _fail(error: MegatronPatchError) -> NoReturn:
    Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1) from error


def _state_of(patch: Patch) -> str:
    core = sys.modules.get("megatron.core")
    if core is not None and not patch.is_needed_by(release_of(core.__version__)):
        spans = (("before", patch.since), ("from", patch.until))
        return "not needed " + " and ".join(f"{word} megatron-core {version}" for word, version in spans if version)
    if is_applied(patch):
        return "applied"
    return "not applied" if patch.group in default_groups() else "not applied (not a default group here)"


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
