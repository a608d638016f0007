"""The sets of patches for Megatron-LM source trees: which there are, and `apply.sh`, which puts one on a checkout."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


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
    """Return the folder of all sets: inside this package in a wheel, `patches` in a checkout (setup.py)."""
    here = Path(__file__).resolve().parent
    return next(place for place in (here / "patches", here.parent / "patches") if place.is_dir())


def patch_sets() -> list[PatchSet]:
    """Return every set, by version."""
    found = []
    for series in sorted(folder().glob("core_v*/series")):
        heads = dict(re.findall(r"^# (upstream|version): (.+)$", series.read_text(), re.MULTILINE))
        found.append(PatchSet(series.parent, heads["upstream"], tuple(heads["version"].split())))
    return found


def patch_checkout(checkout: Path, *, reverse: bool = False, force: bool = False) -> int:
    """Put the set of its version on a Megatron-LM checkout, all of it or nothing, or take it off; `apply.sh`'s status.

    `force`: it need not be a clean git checkout, nor of a version that has a set, if the hunks of one fit. The script
    prints what it did, or why it changed nothing.
    """
    # Through bash, for a wheel does not keep the bit that makes a file executable.
    flags = [flag for flag, given in (("--reverse", reverse), ("--force", force)) if given]
    return subprocess.run(["bash", str(folder() / "apply.sh"), str(checkout), *flags]).returncode
