"""Unpacks this folder of an offline bundle, and runs the checks on GPUs with what has been unpacked so far.

    python3 1/run.py PLACE --unpack                   each folder in turn, in any order
    python3 2/run.py PLACE [pytest's options]         the last one: stages 1 and 2 unless -k says otherwise

PLACE is a folder that is made, and stays between the calls. Needs Python's own library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

USAGE = 4
"""Exit status when something is missing, as pytest's for wrong usage."""
PYTEST = (
    *("-v", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--timeout", "240"),
    *("--device", "cuda", "-k", "stage1 or stage2", "--vllm", "attention_backend=TRITON_ATTN"),
)
"""Options, which later ones override; FlashAttention's extension is not carried."""
_UNPACKED, _TREE = "unpacked.json", "tree"


def unpack(folder: Path, place: Path) -> list[str]:
    """Unpack the items whose last part is in `folder`; keep parts of others in `place`. Returns what is wrong."""
    manifest = read_manifest(folder)
    faults = []
    place.mkdir(parents=True, exist_ok=True)
    done = _unpacked(place)
    number = int(folder.resolve().name)
    for item in manifest["items"]:
        own = [part for part in item["parts"] if part["folder"] == number]
        if not own or done.get(item["name"]) == _hashes(item):
            continue
        wrong = [fault for part in own if (fault := fault_of(folder / part["file"], part))]
        faults += wrong
        if wrong:
            continue
        for part in own:
            if len(item["parts"]) > 1:
                (place / "parts").mkdir(exist_ok=True)
                (place / "parts" / part["file"]).write_bytes((folder / part["file"]).read_bytes())
        homes = [folder if len(item["parts"]) == 1 else place / "parts" for _ in item["parts"]]
        files = [home / part["file"] for home, part in zip(homes, item["parts"], strict=True)]
        # the others may be missing still, or be those of an older bundle
        if not any(fault_of(file, part) for file, part in zip(files, item["parts"], strict=True)):
            _unpack_item(item, b"".join(file.read_bytes() for file in files), place)
            done[item["name"]] = _hashes(item)
    (place / _UNPACKED).write_text(json.dumps(done))
    return faults


def _unpacked(place: Path) -> dict[str, list[str]]:
    """Items that are there, by name: hashes of what they were unpacked from."""
    path = place / _UNPACKED
    found: dict[str, list[str]] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _hashes(item: dict[str, Any]) -> list[str]:
    return [part["sha256"] for part in item["parts"]]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of the whole bundle."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def fault_of(path: Path, part: dict[str, Any]) -> str | None:
    """Why a file is not the one that was packed."""
    if not path.is_file():
        return f"{path} is missing: carry the folder again"
    contents = path.read_bytes()
    if len(contents) != part["nbytes"]:
        return f"{path} has {len(contents)} bytes instead of {part['nbytes']}: carry the folder again"
    if hashlib.sha256(contents).hexdigest() != part["sha256"]:
        return f"{path} has another SHA-256 than when it was packed: carry the folder again"
    return None


def _unpack_item(item: dict[str, Any], contents: bytes, place: Path) -> None:
    target = place / item["place"]
    if item["place"] == _TREE:  # files that a newer tree has no longer
        shutil.rmtree(target, ignore_errors=True)
    if item["kind"] == "xz":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(lzma.decompress(contents))
        return
    target.mkdir(parents=True, exist_ok=True)
    if item["kind"] == "tar.xz":
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(contents))) as tar:
            tar.extractall(target, filter="data")
        return
    with zipfile.ZipFile(io.BytesIO(contents)) as wheel:
        for info in wheel.infolist():
            if (name := _installed_name(info.filename)) is not None and not info.is_dir():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(wheel.read(info))


def _installed_name(name: str) -> str | None:
    """Where a file of a wheel belongs; None for scripts and the like, which nothing here needs."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        raise ValueError(f"{name}: a wheel's file outside of it")
    if not re.fullmatch(r".+\.data", parts[0]):
        return name
    return str(PurePosixPath(*parts[2:])) if parts[1:2] in (("purelib",), ("platlib",)) and parts[2:] else None


def what_is_missing(manifest: dict[str, Any], place: Path) -> dict[int, list[str]]:
    """By stage: what the bundle has and is not unpacked, and what could not be collected."""
    done = _unpacked(place)
    missing: dict[int, list[str]] = {}
    for item in manifest["items"]:
        if done.get(item["name"]) != _hashes(item):
            folders = ", ".join(sorted({str(part["folder"]) for part in item["parts"]}))
            missing.setdefault(item["stage"], []).append(f"{item['name']} of folder {folders} is not unpacked")
    for name, told in manifest["missing"].items():
        missing.setdefault(told["stage"], []).append(f"{name} could not be had when the bundle was made: {told['why']}")
    return missing


def what_differs(manifest: dict[str, Any]) -> list[str]:
    """What of this machine is not what the bundle was made for."""
    found = []
    if sys.version_info[:2] != tuple(map(int, manifest["python"].split("."))):
        found.append(f"Python {sys.version.split()[0]}, and the wheels are for {manifest['python']}")
    for name, made_for in {"torch": manifest["torch"], **manifest["expected"]}.items():  # no version: any will do
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed, and expected here: {made_for}")
            continue
        if made_for and not (
            version == made_for or version.startswith(f"{made_for}.") or version.startswith(f"{made_for}+")
        ):
            found.append(f"{name} {version}, and the bundle was made for {made_for}")
    return found


def environment(place: Path) -> dict[str, str]:
    """Variables of the checks: what was unpacked comes first, and nothing is asked of a network."""
    libraries = [str(path) for entry in sys.path for path in sorted(Path(entry or ".").glob("nvidia/*/lib"))]
    shared = {
        "PYTHONPATH": [str(place / "tree"), str(place / "packages"), os.environ.get("PYTHONPATH", "")],
        "LD_LIBRARY_PATH": [*libraries, os.environ.get("LD_LIBRARY_PATH", "")],
    }
    paths = {name: os.pathsep.join(filter(None, values)) for name, values in shared.items()}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**os.environ, **paths, **offline, "COLUMNS": "200"}


def main(arguments: list[str]) -> int:
    """Unpack; then run pytest, whose exit status is returned."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return USAGE
    folder, place, options = Path(__file__).resolve().parent, Path(arguments[0]).absolute(), arguments[1:]
    manifest = read_manifest(folder)
    if faults := unpack(folder, place):
        print("\n".join(faults), file=sys.stderr)
        return USAGE
    missing = what_is_missing(manifest, place)
    for line in [*what_differs(manifest), *(line for lines in missing.values() for line in lines)]:
        print(line, file=sys.stderr)
    if "--unpack" in options:
        return 0
    if 1 in missing:
        print("not even stage 1 can run: unpack the folders that are named above", file=sys.stderr)
        return USAGE
    checks = place / "tree" / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", str(checks), f"--confcutdir={checks}", *PYTEST, *options]
    return subprocess.run(command, env=environment(place)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
