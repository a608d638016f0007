"""Collects what the checks of tests/gpu need on a machine without registries: `make offline-bundle DIR=… [HAVE=…]`.

python -m offline.bundle DIRECTORY [--have FILE] [--last-stage N] [--cache DIRECTORY]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from offline import vllm
from offline.packing import Item, archive, compressed, write_folders
from offline.wheels import CUDA, PYTHON, TORCH, Wanted, collect, read_installed, read_list

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


def items_of(wheels: Mapping[Wanted, Path], last_stage: int) -> Iterator[Item]:
    """Our tree, and every wheel: vLLM's in pieces, but for those that only a later stage needs."""
    yield archive("hybrid_engine.tar.xz", "tree", 1, _tree())
    for wanted, wheel in wheels.items():
        if wanted.name != "vllm":
            yield Item(wheel.name, "wheel", "packages", wanted.stage, wheel.read_bytes())
            continue
        yield archive("vllm.tar.xz", "packages", wanted.stage, vllm.files_of(wheel))
        for name, stage in vllm.EXTENSIONS.items():
            if stage <= last_stage:
                yield compressed(f"{Path(name).name}.xz", f"packages/{name}", stage, vllm.extension_of(wheel, name))


def _tree() -> Iterator[tuple[str, bytes]]:
    """Files of this checkout as they are now, those that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        raise SystemExit(f"the bundle is made in a git checkout, and git says: {listed.stderr.strip()}")
    for name in sorted(filter(None, listed.stdout.split("\0"))):
        if (REPOSITORY / name).is_file():
            yield name, (REPOSITORY / name).read_bytes()


def main(arguments: list[str] | None = None) -> int:
    """Make the bundle; returns 1 when a wheel could not be had, and the bundle is without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="gets the folders 1, 2, …")
    parser.add_argument("--have", type=Path, help="what `pip list` prints there: what it has is not carried")
    parser.add_argument("--last-stage", type=int, choices=(2, 3), default=2, help="3: for several GPUs there")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / "build" / "offline-wheels", help="of downloads")
    given = parser.parse_args(arguments)
    if given.have is not None and not given.have.is_file():
        parser.error(f"--have {given.have} is no file; write what `pip list` prints there to one")
    installed = {} if given.have is None else read_installed(given.have)
    if given.have is not None and not installed:
        parser.error(f"--have {given.have} names no package; write what `pip list` prints there to it")
    wheels, missing = collect(read_list(HERE / "wheels.txt"), installed, given.cache)
    facts = {
        "python": PYTHON,
        "torch": TORCH,
        "cuda": CUDA,
        "missing": {wanted.name: {"stage": wanted.stage, "why": why} for wanted, why in missing.items()},
        "expected": {
            each.name: installed[each.name]
            for each in read_list(HERE / "wheels.txt")
            if each.name in installed and each not in wheels
        },
    }
    sizes = write_folders(given.directory, [*items_of(wheels, given.last_stage)], facts, HERE / "run.py")
    for folder, nbytes in enumerate(sizes, 1):
        print(f"{given.directory / str(folder)}: {nbytes / 2**20:.1f} MiB")
    print("There, for each folder: python3 FOLDER/run.py PLACE --unpack; with the last: python3 FOLDER/run.py PLACE")
    for wanted, why in missing.items():
        print(f"without {wanted.name}, which stage {wanted.stage} needs: {why}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
