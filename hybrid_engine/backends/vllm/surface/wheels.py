"""A version on the package index, compared with what is used of it: `make vllm-surface VERSION=0.33.0`.

Its wheel is downloaded by pip; the Python files in it are kept and the rest is deleted. Nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hybrid_engine.backends.vllm.surface.behaviours import BEHAVIOURS
from hybrid_engine.backends.vllm.surface.compared import Comparison, compare
from hybrid_engine.backends.vllm.surface.source_reader import Source
from hybrid_engine.backends.vllm.version import DISTRIBUTIONS
from hybrid_engine.errors import DependencyError

_PYTHON = "3.12"
"""Of the wheel to take; that of this process may be too old for it."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_34_x86_64", "manylinux_2_35_x86_64")


def unpack(version: str, directory: Path) -> Path:
    """Have the Python files of that vLLM in `directory`, from the CPU build if there is one, which is smaller.

    Returns the directory, in which `vllm/` lies. What a former call left there is used. Raises DependencyError with
    pip's words when there is no such wheel.
    """
    if (directory / "vllm").is_dir():
        return directory
    said = []
    with tempfile.TemporaryDirectory() as downloads:
        for name in reversed(DISTRIBUTIONS):
            pip = subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
                    *("--only-binary", ":all:", "--python-version", _PYTHON, "--dest", downloads),
                    *(option for platform in _PLATFORMS for option in ("--platform", platform)),
                    f"{name}=={version}",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            if pip.returncode == 0:
                _unzip(next(Path(downloads).glob("*.whl")), directory)
                return directory
            said.append(pip.stderr.strip())
    raise DependencyError("\n".join([f"no wheel of vLLM {version} was found:", *said]))


def _unzip(wheel: Path, directory: Path) -> None:
    """Aside first, so that what was interrupted is not taken for a whole one."""
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=directory) as aside:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(aside, names)
        (Path(aside) / "vllm").rename(directory / "vllm")


def compare_wheel(version: str) -> Comparison:
    """What a version of the package index lacks. Raises DependencyError when there is no such wheel."""
    return compare(Source(unpack(version, Path("build") / f"vllm-{version}"), "vllm"), version)


def report(version: str, result: Comparison) -> int:
    """Print what differs; returns 1 if anything does."""
    for title, lines in (("cannot be used", result.faults), ("not read yet", result.unread)):
        print("\n".join([f"{title}: {len(lines)}", *(f"  - {line}" for line in lines)]))
    print(f"vLLM {version}: {result.num_names} names and calls, {len(BEHAVIOURS)} pieces of code")
    return int(bool(result.faults or result.unread))


def main(version: str) -> int:
    """Print what differs; returns 1 if anything does, 2 without a wheel."""
    try:
        return report(version, compare_wheel(version))
    except DependencyError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
