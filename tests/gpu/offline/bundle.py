"""Bundle of the checks of tests/gpu for a machine without package registries: `make offline-bundle
DIR=… [HAVE=…]`.

python -m tests.gpu.offline.bundle DIRECTORY [--have FILE] [--last-stage N]

DIRECTORY/1/manifest.json, run.py, stage1.tar.xz.000, …  tree/: this checkout; packages/: wheels.txt
DIRECTORY/2/manifest.json, run.py, stage2.tar.xz.001, …  each folder is small enough to be sent
alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PYTHON = "3.12"
TORCH = "2.11"
FOLDER_NBYTES = 56 * 2**20
"""A folder and a copy of this checkout fit in 64 MiB together."""
_KEPT_FREE = 2**18
"""Bytes of a folder that are reserved for the manifest and run.py."""
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc in tags of wheels; pip compares tags literally."""
_PLATFORMS = (
    "linux_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC),
)
_EXTENSIONS = {"_C_stable_libtorch.abi3.so": 2, "_moe_C_stable_libtorch.abi3.so": 3}
"""First stage that needs each large extension of vLLM; the second extension is for experts."""
_SMALL = 64 * 1024
"""Maximum size in bytes of other extensions of vLLM in the bundle."""
_FLASH_ATTENTION = "vllm_flash_attn/_vllm_fa2_C.py"
"""Empty replacement of FlashAttention's extension, which its package imports."""


def read_list(path: Path = HERE / "wheels.txt") -> dict[str, tuple[int, str]]:
    """Return (first stage that needs it, requirement) by package. Stage 0 is left out of the
    bundle.

    A requirement is a name, or `name==version`.
    """
    packages = {}
    stage = 0
    for line in path.read_text().splitlines():
        if heading := re.fullmatch(r"# (?:stage (\d)|left out: .+)", line):
            stage = int(heading[1] or 0)
        elif line and not line.startswith("#"):
            packages[canonicalize_name(Requirement(line).name)] = (stage, line)
    return packages


def read_installed(path: Path) -> dict[str, str]:
    """Return versions by name from the target machine's `pip list`, in either format."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = [
        re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==|\s+)([0-9]\S*).*", line) for line in lines
    ]
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def install(requirements: Sequence[str], target: Path, cache: Path) -> None:
    """Install wheels for the target machine without dependencies; raise SystemExit on failure."""
    pip = [sys.executable, "-m", "pip"]
    wheels = [
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    ]
    wheels += [
        word for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)
    ]
    wheels += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    wheels += ["--constraint", str(REPOSITORY / "requirements-cpu.txt"), *requirements]
    for command in (
        [*pip, "download", "--find-links", str(cache), "--dest", str(cache)],
        [
            *pip,
            "install",
            "--no-index",
            "--find-links",
            str(cache),
            "--no-compile",
            "--target",
            str(target),
        ],
    ):
        if status := subprocess.run([*command, *wheels]).returncode:
            sys.exit(status)


def packages_in(*folders: Path) -> dict[str, metadata.Distribution]:
    """Return the packages that `install` has put into folders, by name."""
    return {
        canonicalize_name(item.name): item
        for item in metadata.distributions(path=[*map(str, folders)])
    }


def required(packages: Mapping[str, metadata.Distribution]) -> Iterator[tuple[str, Requirement]]:
    """Yield (package, requirement) for all requirements on the target machine.

    Requirements of an extra count if another of the packages requires the package with this extra.
    """
    target = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    pending = [(name, "") for name in packages]
    for name, extra in pending:  # Grows in the loop.
        for requirement in map(Requirement, packages[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(
                {**target, "extra": extra}
            ):
                yield name, requirement
                required_name = canonicalize_name(requirement.name)
                if required_name in packages:
                    pairs = [(required_name, wanted) for wanted in sorted(requirement.extras)]
                    pending += [pair for pair in pairs if pair not in pending]


def unsuitable(
    packages: Mapping[str, metadata.Distribution], installed: Mapping[str, str]
) -> set[str]:
    """Return the installed packages in a version that one of the packages refuses."""
    names = set()
    for _, requirement in required(packages):
        name = canonicalize_name(requirement.name)
        if name in installed and not requirement.specifier.contains(
            installed[name], prereleases=True
        ):
            names.add(name)
    return names


def unlisted(
    packages: Mapping[str, metadata.Distribution], installed: Collection[str]
) -> list[str]:
    """Describe required packages that are neither given, nor installed, nor left out."""
    known = {*packages, *installed, *read_list()}
    pairs = {
        (canonicalize_name(requirement.name), package)
        for package, requirement in required(packages)
    }
    return [
        f"{name}, which {package} requires" for name, package in sorted(pairs) if name not in known
    ]


def with_torch() -> set[str]:
    """Return the names of torch and its requirements, which are installed together."""
    ours = {"torch": metadata.distribution("torch")}  # The CPU build, without Triton.
    return {
        "torch",
        "triton",
        *(canonicalize_name(requirement.name) for _, requirement in required(ours)),
    }


def prune(vllm: Path, last_stage: int) -> None:
    """Remove files of vLLM that the stages do not need: 280 MB of 330."""
    for path in [path for path in vllm.rglob("*") if path.is_file()]:
        is_kept = path.stat().st_size <= _SMALL or _EXTENSIONS.get(path.name, 4) <= last_stage
        is_source = (
            path.suffix in (".h", ".hpp", ".cuh", ".cu", ".inl") and "third_party" in path.parts
        )
        if (path.suffix == ".so" and not is_kept) or path.name == "vllm-rs" or is_source:
            path.unlink()
    (vllm / _FLASH_ATTENTION).parent.mkdir(parents=True, exist_ok=True)
    (vllm / _FLASH_ATTENTION).touch()


def write_metadata(packages: Path) -> None:
    """Write the metadata of an installed project, by whose entry points vLLM finds the plugin."""
    project = metadata.distribution("hybrid-engine")
    directory = packages / f"hybrid_engine-{project.version}.dist-info"
    directory.mkdir()
    # The original text: a parsed one has the README as a header, which email refuses to
    # write where a line of it looks like a header.
    # setuptools leaves PKG-INFO in place of METADATA where a wheel was built in the checkout.
    text = project.read_text("METADATA") or project.read_text("PKG-INFO") or ""
    (directory / "METADATA").write_text(text)
    (directory / "entry_points.txt").write_text(project.read_text("entry_points.txt") or "")


def tracked() -> Iterator[Path]:
    """Return the files of this checkout that git tracks, as relative paths."""
    result = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    paths = (Path(name) for name in result.stdout.split("\0") if name)
    return (path for path in paths if (REPOSITORY / path).is_file())


def write_folders(
    directory: Path, archives: Sequence[Path], facts: Mapping[str, Any], limit: int
) -> list[int]:
    """Split archives in turn into the folders 1, 2, … of at most `limit` bytes; return the folders'
    sizes.

    Removes the folders of an earlier bundle in `directory`.
    """
    for old in directory.glob("[0-9]*"):
        if (old / "manifest.json").is_file():
            shutil.rmtree(old)
    folder = 1
    room = limit - _KEPT_FREE
    listed = []
    for archive in archives:
        parts: list[dict[str, Any]] = []
        with archive.open("rb") as file:
            while contents := file.read(room):
                path = directory / str(folder) / f"{archive.name}.{len(parts):03}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents)
                digest = hashlib.sha256(contents).hexdigest()
                parts.append({"folder": folder, "file": path.name, "sha256": digest})
                room -= len(contents)
                if not room:
                    folder += 1
                    room = limit - _KEPT_FREE
        listed.append({"name": archive.name, "parts": parts})
    folders = sorted(directory.glob("[0-9]*"), key=lambda path: int(path.name))
    for path in folders:
        (path / "manifest.json").write_text(json.dumps({**facts, "archives": listed}, indent=1))
        shutil.copyfile(HERE / "run.py", path / "run.py")
    return [sum(file.stat().st_size for file in path.iterdir()) for path in folders]


def pack(archive: Path, folders: Mapping[str, Path], names: Collection[Path] | None = None) -> None:
    """Compress folders; of the folder "tree" only the files `names`."""
    with tarfile.open(
        archive, "w:xz", preset=3
    ) as tar:  # Level 6 takes twice the time and saves 5 %.
        for name, folder in folders.items():
            for path in names if name == "tree" and names is not None else [Path()]:
                tar.add(folder / path, Path(name) / path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="receives the folders 1, 2, …")
    parser.add_argument(
        "--have", type=Path, help="output of `pip list` there; these packages are left out"
    )
    parser.add_argument(
        "--last-stage", type=int, choices=(2, 3), default=2, help="3: for several GPUs there"
    )
    options = parser.parse_args(arguments)
    installed = read_installed(options.have) if options.have else {}
    if options.have and not installed:
        parser.error(
            f"--have {options.have} lists no package; write the output of `pip list` there to it"
        )
    wanted = {name: (stage, line) for name, (stage, line) in read_list().items() if stage}
    cache = REPOSITORY / "build" / "offline-wheels"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offline-bundle-") as scratch:
        stages = {stage: Path(scratch) / str(stage) for stage in (1, 2)}
        for stage, packages in stages.items():
            todo = {
                name
                for name, (first, _) in wanted.items()
                if first == stage and name not in installed
            }
            while todo:
                install([wanted[name][1] for name in sorted(todo)], packages, cache)
                for name in todo:
                    installed.pop(name, None)
                todo = unsuitable(packages_in(packages), installed) & wanted.keys()
            packages.mkdir(exist_ok=True)
        write_metadata(stages[1])
        if faults := unlisted(packages_in(*stages.values()), {*installed, *with_torch()}):
            sys.exit(
                "List in tests/gpu/offline/wheels.txt, by its stage or as left out:\n"
                + "\n".join(faults)
            )
        archives = []
        for stage, packages in stages.items():
            if (packages / "vllm").is_dir():
                prune(packages / "vllm", options.last_stage)
            archives.append(Path(scratch) / f"stage{stage}.tar.xz")
            folders = {"packages": packages} | ({"tree": REPOSITORY} if stage == 1 else {})
            pack(archives[-1], folders, [*tracked()])
        facts = {"python": PYTHON, "torch": TORCH}
        for number, nbytes in enumerate(
            write_folders(options.directory, archives, facts, FOLDER_NBYTES), 1
        ):
            print(f"{options.directory / str(number)}: {nbytes / 2**20:.1f} MiB")
    print(
        "There, for each folder: python3 FOLDER/run.py PLACE --unpack; with the "
        "last: python3 FOLDER/run.py PLACE"
    )


if __name__ == "__main__":
    main()
