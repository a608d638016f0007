"""The import floors of the design: what each module may import, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hybrid_engine

REPO_ROOT = Path(__file__).resolve().parents[2]
ENGINE, PATCHES = "hybrid_engine", "megatron_patches"

# Floor of a module: the longest prefix counts. Imports go downward or stay on their floor.
FLOORS = {
    "hybrid_engine.errors": 0,
    "hybrid_engine.durable_files": 0,
    "hybrid_engine.scratch": 0,
    "hybrid_engine.planning": 0,
    "hybrid_engine.layouts": 0,
    "hybrid_engine.models": 0,
    "hybrid_engine.config": 0,
    "hybrid_engine.constraints": 0,
    "hybrid_engine.documents": 0,
    "hybrid_engine.reduced": 0,
    "hybrid_engine.report": 0,
    "hybrid_engine.hosts": 0,
    "hybrid_engine.ports": 1,
    "hybrid_engine.process_groups": 1,
    "hybrid_engine.failure_watch": 1,
    "hybrid_engine.agreement": 1,
    "hybrid_engine.memory": 2,
    "hybrid_engine.transports": 2,
    "hybrid_engine.backends": 2,
    "hybrid_engine.handover": 3,
    "hybrid_engine.sharding_manager": 3,
    "hybrid_engine.states": 3,
    "hybrid_engine.hybrid_engine": 4,
    "hybrid_engine.assembly": 4,
    "hybrid_engine.megatron_script": 4,
    "hybrid_engine.worker": 4,
    "hybrid_engine.launching": 4,
    "hybrid_engine.reference": 4,
    "hybrid_engine.verify": 4,
    "hybrid_engine.cli": 4,
    "hybrid_engine.__main__": 4,
    "hybrid_engine": 4,
}
PURE = (
    "hybrid_engine.errors",
    "hybrid_engine.durable_files",
    "hybrid_engine.planning",
    "hybrid_engine.layouts",
    "hybrid_engine.models",
)
PURE_PACKAGES = {"numpy"}
ASSIGNMENT, ASSIGNMENT_PACKAGES = "hybrid_engine.layouts.placement", {"scipy"}
CONFIG_PACKAGES = {"pydantic", "yaml"}
# Who may import it: the one backend, and the top floor, which applies the patches.
ENGINES = {
    "megatron": ("hybrid_engine.backends.megatron",),
    "vllm": ("hybrid_engine.backends.vllm",),
}
# What loads where neither engine is installed.
WITHOUT_ENGINES = (
    "hybrid_engine",
    "hybrid_engine.config",
    "hybrid_engine.cli",
    "hybrid_engine.layouts",
    "hybrid_engine.planning",
    "hybrid_engine.models",
    "hybrid_engine.memory",
    "hybrid_engine.transports",
    "hybrid_engine.sharding_manager",
    "hybrid_engine.hybrid_engine",
)


@dataclass(frozen=True)
class Import:
    """`module` imports `target`, somewhere in its source, inside functions and for type checking too."""

    module: str
    target: str
    line: int

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import; relative ones are made absolute."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            targets = [f"{origin}.{alias.name}" if is_module(origin, alias.name) else origin for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(module, target, node.lineno)


def is_module(package: str, name: str) -> bool:
    """Whether `from package import name` names a module of this repository."""
    folder = REPO_ROOT.joinpath(*package.split("."))
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def sources(package: str) -> list[Path]:
    return sorted((REPO_ROOT / package).rglob("*.py"))


def all_imports(package: str) -> list[Import]:
    return [found for path in sources(package) for found in imports_of(path)]


def below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def floor_of(module: str) -> int:
    prefixes = [prefix for prefix in FLOORS if below(module, prefix)]
    return FLOORS[max(prefixes, key=len)]


def test_every_module_has_a_floor() -> None:
    """A new module at the top of the package must be put on one; one that is gone leaves none behind."""
    modules = [module_name(path) for path in sources(ENGINE)]
    unplaced = [
        module
        for module in modules
        if module != ENGINE and max((p for p in FLOORS if below(module, p)), key=len) == ENGINE
    ]
    assert unplaced == []
    assert set(FLOORS) <= set(modules)


def test_imports_go_downward() -> None:
    upward = [
        str(found)
        for found in all_imports(ENGINE)
        if found.package == ENGINE and found.target != ENGINE and floor_of(found.target) > floor_of(found.module)
    ]
    assert upward == []


def test_the_lowest_floor_is_pure() -> None:
    impure = []
    for found in all_imports(ENGINE):
        allowed = set(sys.stdlib_module_names) | PURE_PACKAGES | {ENGINE}
        if found.module in ("hybrid_engine.config", "hybrid_engine.documents"):
            allowed |= CONFIG_PACKAGES
        elif found.module == ASSIGNMENT:
            allowed |= ASSIGNMENT_PACKAGES
        elif not any(below(found.module, prefix) for prefix in PURE):
            continue
        if found.package not in allowed:
            impure.append(str(found))
    assert impure == []


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_imported_in_one_place(engine: str) -> None:
    elsewhere = [
        str(found)
        for found in all_imports(ENGINE)
        if found.package == engine and not any(below(found.module, home) for home in ENGINES[engine])
    ]
    assert elsewhere == []


def test_patches_are_used_by_the_megatron_backend_and_the_top_floor() -> None:
    elsewhere = [
        str(found)
        for found in all_imports(ENGINE)
        if found.package == PATCHES
        and not below(found.module, "hybrid_engine.backends.megatron")
        and floor_of(found.module) < 4
    ]
    assert elsewhere == []


def test_backends_do_not_know_each_other() -> None:
    backends = ("hybrid_engine.backends.megatron", "hybrid_engine.backends.vllm")
    crossing = [
        str(found)
        for found in all_imports(ENGINE)
        for own, other in (backends, backends[::-1])
        if below(found.module, own) and below(found.target, other)
    ]
    assert crossing == []


def test_patches_do_not_know_the_engine() -> None:
    assert [str(found) for found in all_imports(PATCHES) if found.package in (ENGINE, "vllm", "examples")] == []


def test_all_but_the_backends_loads_without_megatron_and_vllm() -> None:
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"sys.modules[{engine!r}] = None" for engine in ENGINES),
            *(f"importlib.import_module({module!r})" for module in WITHOUT_ENGINES),
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", hybrid_engine.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(hybrid_engine, name).__name__.endswith(name)


def test_no_file_is_named_utils() -> None:
    packages = [ENGINE, PATCHES, "examples", "benchmarks", "tests", "docs"]
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [path for package in packages for path in sources(package) if path.stem in vague] == []


def test_files_are_of_a_few_hundred_lines() -> None:
    long = {
        str(path.relative_to(REPO_ROOT)): count
        for package in (ENGINE, PATCHES)
        for path in sources(package)
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("import megatron.core as core", ["megatron.core"]),
        ("def f():\n    from megatron import core", ["megatron"]),
        ("from hybrid_engine import worker, load_config", ["hybrid_engine.worker", "hybrid_engine"]),
        ("from .. import worker", ["hybrid_engine.worker"]),
        ("from .regions import Region", ["hybrid_engine.planning.regions"]),
    ],
)
def test_imports_are_found(source: str, targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of sources itself."""
    file = tmp_path / "hybrid_engine" / "planning" / "module.py"
    file.parent.mkdir(parents=True)
    for name in ("hybrid_engine/worker.py", "hybrid_engine/planning/regions.py"):
        (tmp_path / name).touch()
    file.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "REPO_ROOT", tmp_path)
    assert [found.target for found in imports_of(file)] == targets
