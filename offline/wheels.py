"""Downloads wheels for the machine there, but for what it has."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHON, TORCH, CUDA = "3.12", "2.11", "13"
_REPOSITORY = Path(__file__).resolve().parents[1]
_PINS = _REPOSITORY / "requirements-cpu.txt"
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc that wheels are tagged with; pip takes the names literally."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC),
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64", "any"),
)
_TARGET = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON}.0",
    "python_version": PYTHON,
    "sys_platform": "linux",
    "extra": "",
}


@dataclass(frozen=True)
class Wanted:
    """A line of wheels.txt: `requirement` is a name, or `name==version`; `stage` the first that needs it."""

    requirement: str
    stage: int

    @property
    def name(self) -> str:
        """As package indexes compare names."""
        return canonicalize_name(Requirement(self.requirement).name)


def read_list(path: Path) -> list[Wanted]:
    """Read wheels.txt, in its order."""
    found, stage = [], 0
    for line in path.read_text().splitlines():
        if heading := re.fullmatch(r"# stage (\d)", line):
            stage = int(heading[1])
        elif line and not line.startswith("#"):
            found.append(Wanted(line, stage))
    return found


def read_installed(path: Path) -> dict[str, str]:
    """Versions by name, from what `pip list` prints on the machine there, in either of its formats.

    A line may also be a name alone, whose version is then "": it is taken to fit.
    """
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = [re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?:==|\s+)([0-9]\S*).*)?", line) for line in lines]
    return {canonicalize_name(pair[1]): pair[2] or "" for pair in pairs if pair}


def collect(
    wanted: Sequence[Wanted], installed: Mapping[str, str], directory: Path
) -> tuple[dict[Wanted, Path], dict[Wanted, str]]:
    """Download to `directory` what is wanted and not installed there in a version that the others take.

    Wheels that are in `directory` already are not downloaded again. Returns the wheels, and for those that could not
    be had what pip says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wheels: dict[Wanted, Path] = {}
    missing: dict[Wanted, str] = {}
    todo = [each for each in wanted if each.name not in installed]
    while todo:
        if absent := [each for each in todo if _in_directory(each, directory) is None]:
            _download(absent, directory)  # by one pip; of what this fails for, one after the other says why
        for each in todo:
            found = _in_directory(each, directory) or _downloaded(each, directory)
            if isinstance(found, Path):
                wheels[each] = found
            else:
                missing[each] = found
        unfit = unsuitable(installed, wheels.values())
        todo = [each for each in wanted if each.name in unfit and each not in wheels and each not in missing]
    return wheels, missing


def unsuitable(installed: Mapping[str, str], wheels: Iterable[Path]) -> set[str]:
    """Names of what is installed in a version that one of the wheels does not take."""
    return {
        name
        for wheel in wheels
        for requirement in requirements_of(wheel)
        if installed.get(name := canonicalize_name(requirement.name))
        and not requirement.specifier.contains(installed[name], prereleases=True)
    }


def requirements_of(wheel: Path) -> Iterator[Requirement]:
    """Those that count on the machine there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = Parser().parsestr(archive.read(name).decode())
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(_TARGET):
            yield requirement


def _in_directory(wanted: Wanted, directory: Path) -> Path | None:
    specifier = Requirement(_pinned(wanted)).specifier
    for path in sorted(directory.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        if name == wanted.name and specifier.contains(version, prereleases=True):
            return path
    return None


def _pinned(wanted: Wanted) -> str:
    """With the version of requirements-cpu.txt where the list names none."""
    pins = (re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in _PINS.read_text().splitlines())
    versions = {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}
    version = versions.get(wanted.name)
    return wanted.requirement if "==" in wanted.requirement or version is None else f"{wanted.requirement}=={version}"


def _downloaded(wanted: Wanted, directory: Path) -> Path | str:
    """The wheel, or what pip says."""
    errors = _download([wanted], directory)
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or ["pip found no wheel"]
    return _in_directory(wanted, directory) or lines[-1].removeprefix("ERROR: ")


def _download(wanted: Iterable[Wanted], directory: Path) -> str:
    """Returns what pip says to it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    command += ["--dest", str(directory), *map(_pinned, wanted)]
    return subprocess.run(command, capture_output=True, text=True).stderr
