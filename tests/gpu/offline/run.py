"""Unpack this folder of an offline bundle, and run the checks on GPUs with all folders unpacked so
far.

    python3 1/run.py PLACE --unpack                   for each folder, in any order
    python3 2/run.py PLACE [pytest's options]     for the last folder: stages 1 and 2

PLACE is a folder that is created, and kept between the calls. Requires only Python's standard
library.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

USAGE = 4
"""Exit status if something is missing, as pytest's for wrong usage."""
PYTEST = (
    *("-v", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--timeout", "240"),
    *("--device", "cuda", "-k", "stage1 or stage2", "--vllm", "attention_backend=TRITON_ATTN"),
)
"""Options, which later ones override; the bundle does not contain FlashAttention's extension."""


def unpack(folder: Path, place: Path, manifest: dict[str, Any]) -> list[str]:
    """Copy this folder's parts to PLACE, and unpack complete archives; return messages about the
    others.

    Raises SystemExit for a damaged part.
    """
    (place / "parts").mkdir(parents=True, exist_ok=True)
    missing = []
    for archive in manifest["archives"]:
        digests = " ".join(part["sha256"] for part in archive["parts"])
        unpacked = place / f"{archive['name']}.unpacked"
        if unpacked.is_file() and unpacked.read_text() == digests:
            continue
        for part in archive["parts"]:
            if str(part["folder"]) == folder.name:
                if digest_of(folder / part["file"]) != part["sha256"]:
                    sys.exit(
                        f"{folder / part['file']} is not the file that was packed: "
                        "carry the folder again"
                    )
                shutil.copyfile(folder / part["file"], place / "parts" / part["file"])
        parts = [(place / "parts" / part["file"], part) for part in archive["parts"]]
        lacking = sorted(
            {str(part["folder"]) for path, part in parts if digest_of(path) != part["sha256"]}
        )
        if lacking:
            missing.append(
                f"{archive['name']} is not unpacked: folder {', '.join(lacking)} was not"
            )
            continue
        whole = place / archive["name"]
        with whole.open("wb") as file:
            for path, _ in parts:
                file.write(path.read_bytes())
        if archive["name"].startswith("stage1"):  # A newer tree may lack some files.
            shutil.rmtree(place / "tree", ignore_errors=True)
        with tarfile.open(whole) as tar:
            tar.extractall(place, filter="data")
        for path in (whole, *(path for path, _ in parts)):
            path.unlink()
        unpacked.write_text(digests)
    return missing


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def environment(place: Path) -> dict[str, str]:
    """Return the environment of the checks: unpacked modules first, and no network."""
    libraries = [
        str(path) for entry in sys.path for path in sorted(Path(entry or ".").glob("nvidia/*/lib"))
    ]
    shared = {
        "PYTHONPATH": [
            str(place / "tree"),
            str(place / "packages"),
            os.environ.get("PYTHONPATH", ""),
        ],
        "LD_LIBRARY_PATH": [*libraries, os.environ.get("LD_LIBRARY_PATH", "")],
    }
    paths = {name: os.pathsep.join(filter(None, values)) for name, values in shared.items()}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    absent = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # The bundle does not contain FlashInfer.
    return {**os.environ, **paths, **offline, **absent, "COLUMNS": "200"}


def main(arguments: list[str]) -> int:
    """Unpack, run pytest, and return its exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return USAGE
    folder = Path(__file__).resolve().parent
    place = Path(arguments[0]).absolute()
    options = arguments[1:]
    manifest = json.loads((folder / "manifest.json").read_text())
    missing = unpack(folder, place, manifest)
    expected = f"Python {manifest['python']} and torch {manifest['torch']}"
    actual = f"Python {sys.version.split()[0]} and torch {_torch()}"
    print(f"made for {expected}; this machine has {actual}", *missing, sep="\n", file=sys.stderr)
    if "--unpack" in options:
        return 0
    checks = place / "tree" / "tests" / "gpu"
    if not checks.is_dir():
        print("not even stage 1 can run: unpack the folders that are named above", file=sys.stderr)
        return USAGE
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(checks),
        f"--confcutdir={checks}",
        *PYTEST,
        *options,
    ]
    return subprocess.run(command, env=environment(place)).returncode


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
