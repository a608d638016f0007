"""The import floors of the design: what each module may import, read from the sources."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hybrid_engine

REPO_ROOT = Path(__file__).resolve().parents[2]
ENGINE, PATCHES = "hybrid_engine", "megatron_patches"

# Bottom to top. A module imports from its own floor and from lower ones; between packages, too, there are no circles.
FLOORS = (
    ("errors", "files", "messages", "records", "ranks"),
    ("planning", "memory", "tracing", "probes"),
    ("models", "layouts", "ports", "transports"),
    ("config",),
    ("switch",),
    ("serving",),
    ("backends",),
    ("vllm_plugin",),
    ("assembly", "hybrid_engine", "attaching", "megatron_script"),
    ("trainer",),
    ("integrations", "rl"),
    ("tools", "__main__", ""),
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}
# What each imports beside the standard library; the longest name that fits a module counts. Without torch: pure.
OUTSIDE = {
    "errors": set(),
    "files": {"huggingface_hub", "yaml"},
    "messages": {"msgspec"},
    "records": {"msgspec", "numpy"},
    "ranks": {"torch", "xxhash"},
    "models": set(),
    "models.config_json": {"pydantic"},
    "models.derived": {"torch", "transformers"},
    "planning": {"numpy", "scipy"},
    "memory": {"cuda", "numpy", "torch"},
    "tracing": {"torch"},
    "layouts": {"numpy"},
    "ports": {"torch"},
    "probes": {"torch"},
    "config": {"pydantic"},
    "config.override_rules": {"megatron_patches", "pydantic"},  # inside a function: what it imports needs torch
    "tools": set(),
    "tools.plan": {"numpy"},
    "transports": {"msgspec", "numpy", "torch"},
    "switch": {"torch"},
    "switch.report": set(),
    "switch.states": set(),
    "backends": {"torch"},
    "backends.fsdp": {"packaging", "peft", "torch", "transformers"},
    "backends.huggingface": {"numpy", "rich", "safetensors", "torch"},
    "backends.megatron": {"megatron", "megatron_patches", "packaging", "pydantic", "torch"},
    "backends.vllm": {"numpy", "pydantic", "torch", "transformers", "vllm"},
    "backends.vllm.engine_settings": {"pydantic"},
    "serving": {"msgspec", "ray", "requests", "torch"},
    "vllm_plugin": {"vllm"},
    "assembly": {"torch"},
    "hybrid_engine": {"torch"},
    "attaching": {"megatron_patches", "pydantic", "torch"},
    "megatron_script": {"megatron_patches", "torch"},
    "trainer": {"torch"},
    "trainer.fsdp": {"torch"},
    "trainer.megatron": {"megatron", "megatron_patches", "torch"},
    "rl": {"pydantic", "torch"},
    "rl.completion_log": {"rich", "torch"},
    "integrations": {"ray", "verl"},  # in what verl imports; other frameworks by name, where one is used
    "tools.verify": {"numpy", "safetensors", "torch", "transformers"},
    "tools.verify.cases": set(),
    "tools.cli": {"rich", "typer", "yaml"},
}
# What runs in place of a GPU: never imported where one is.
STAND_INS = ("megatron_patches.cpu", "hybrid_engine.backends.vllm.cpu")
# Who may ask torch.distributed for this rank or their number: who makes a job or starts its ranks, and what reads
# Megatron's parallel state, which is as global. The `Job` tells all others.
ASK_FOR_THEIR_RANK = (
    "hybrid_engine.ranks.world",
    "hybrid_engine.tools.verify.verify",
    "hybrid_engine.backends.megatron.model_tensors",
    "hybrid_engine.backends.megatron.live_model",
)
# Private names of torch are in the first two, each with its reason; in the third an operator has such a name.
TORCH_INTERNALS = (
    "hybrid_engine.ranks.torch_internals",
    "hybrid_engine.backends.fsdp.internals",
    "hybrid_engine.backends.vllm.weights.tracing",
)
# What loads where neither engine is installed.
WITHOUT_ENGINES = tuple(
    f"hybrid_engine.{name}" for name in FLOOR_OF if name not in ("backends", "tools", "__main__", "")
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


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """A module and all that is in it."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import; relative ones are made absolute."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes_of(path):
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
    folder = REPO_ROOT.joinpath(*package.split("."))
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def sources(package: str) -> list[Path]:
    return sorted((REPO_ROOT / package).rglob("*.py"))


@functools.cache
def all_imports(package: str) -> list[Import]:
    return [found for path in sources(package) for found in imports_of(path)]


def below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def part_of(module: str) -> str:
    """The package or module of the engine's top level that a module belongs to; "" for `hybrid_engine` itself."""
    return module.removeprefix(ENGINE).removeprefix(".").partition(".")[0]


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """What of a graph lies on a circle or between two."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target:
            graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_part_has_a_floor() -> None:
    """A new module or package at the top must be put on one; one that is gone leaves none behind."""
    assert set(FLOOR_OF) == {part_of(module_name(path)) for path in sources(ENGINE)}


def test_imports_go_downward() -> None:
    wrong = [
        str(found)
        for found in all_imports(ENGINE)
        if found.package == ENGINE
        and (source := part_of(found.module)) != (target := part_of(found.target))
        and FLOOR_OF[target] > FLOOR_OF[source]
        and target
    ]
    assert wrong == []


@pytest.mark.parametrize("package", [ENGINE, PATCHES])
def test_no_circles(package: str) -> None:
    """Neither between modules nor between folders, at any depth; imports inside functions count."""
    imports = [found for found in all_imports(package) if found.package == package]
    assert circles((found.module, found.target) for found in imports) == []
    for depth in (2, 3, 4):
        folders = [tuple(".".join(name.split(".")[:depth]) for name in (one.module, one.target)) for one in imports]
        assert circles(folders) == []


def entry_of(module: str) -> str:
    """Which of OUTSIDE counts for a module; "" for none."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in OUTSIDE), "")


def test_each_package_imports_what_it_may() -> None:
    """No more and no less: an entry that nothing needs any more would let it come back unseen."""
    outside = [one for one in all_imports(ENGINE) if one.package not in {ENGINE, *sys.stdlib_module_names}]
    assert [str(one) for one in outside if one.package not in OUTSIDE.get(entry_of(one.module), ())] == []
    found = {name: {one.package for one in outside if entry_of(one.module) == name} for name in OUTSIDE}
    assert found == OUTSIDE


def test_backends_do_not_know_each_other() -> None:
    backends = ("hybrid_engine.backends.megatron", "hybrid_engine.backends.vllm")
    crossing = [
        str(found)
        for found in all_imports(ENGINE)
        for own, other in (backends, backends[::-1])
        if below(found.module, own) and below(found.target, other)
    ]
    assert crossing == []


def test_stand_ins_for_gpus_are_imported_when_they_are_needed() -> None:
    """By each other, or inside a function; `megatron_patches.patch` names a module to import, as text."""
    at_once = [
        f"{module_name(path)} imports {target}"
        for path in (*sources(ENGINE), *sources(PATCHES))
        for node in ast.iter_child_nodes(nodes_of(path)[0])
        if isinstance(node, ast.ImportFrom) and node.module
        for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        if any(below(target, home) and not below(module_name(path), home) for home in STAND_INS)
    ]
    assert at_once == []


def test_patches_do_not_know_the_engine() -> None:
    assert [str(found) for found in all_imports(PATCHES) if found.package in (ENGINE, "vllm", "examples")] == []


@pytest.mark.slow
def test_all_but_the_backends_loads_without_megatron_and_vllm() -> None:
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"sys.modules[{engine!r}] = None" for engine in ("megatron", "vllm")),
            *(f"importlib.import_module({module!r})" for module in WITHOUT_ENGINES),
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_job_says_who_is_who() -> None:
    asking = [
        f"{module_name(path)}:{node.lineno} calls {node.func.attr}"
        for path in sources(ENGINE)
        if not any(below(module_name(path), home) for home in ASK_FOR_THEIR_RANK)
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
        if node.func.attr in ("get_rank", "get_world_size")
    ]
    assert asking == []


def private_names_of_torch(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Those that are imported, or reached through modules and classes of torch; not those of its objects."""
    roots: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots |= {alias.asname or "torch" for alias in node.names if below(alias.name, "torch")}
        elif isinstance(node, ast.ImportFrom) and below(node.module or "", "torch"):
            roots |= {alias.asname or alias.name for alias in node.names}
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in roots:
                yield node.attr


def test_private_names_of_torch_are_where_their_reasons_are() -> None:
    elsewhere = [
        f"{module_name(path)}: {name}"
        for path in sources(ENGINE)
        if module_name(path) not in TORCH_INTERNALS
        for name in private_names_of_torch(nodes_of(path))
    ]
    assert elsewhere == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch.distributed as dist\ndist.c10d._store()", ["_store"]),
        ("import torch.nn\ntorch._C._cuda()", ["_C", "_cuda"]),
        ("from torch.utils._dispatch import flat", ["_dispatch"]),
        ("from torch import distributed\ndistributed._world", ["_world"]),
        ("import torch\ntorch.nn.__name__\nself._store", []),
    ],
)
def test_private_names_are_found(source: str, names: list[str]) -> None:
    assert sorted(private_names_of_torch(list(ast.walk(ast.parse(source))))) == names


@pytest.mark.slow
@pytest.mark.parametrize("name", hybrid_engine.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(hybrid_engine, name).__name__.endswith(name)


def test_no_file_is_named_utils() -> None:
    packages = [ENGINE, PATCHES, "examples", "benchmarks", "tests", "docs"]
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [path for package in packages for path in sources(package) if path.stem in vague] == []


def test_files_have_at_most_700_lines() -> None:
    long = {
        str(path.relative_to(REPO_ROOT)): count
        for package in (ENGINE, PATCHES)
        for path in sources(package)
        if (count := len(path.read_text().splitlines())) > 700
    }
    assert long == {}


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("import megatron.core as core", ["megatron.core"]),
        ("def f():\n    from megatron import core", ["megatron"]),
        ("from hybrid_engine import worker, load_config", ["hybrid_engine.worker", "hybrid_engine"]),
        ("from .. import worker", ["hybrid_engine.worker"]),
        ("from ..records.regions import Region", ["hybrid_engine.records.regions"]),
    ],
)
def test_imports_are_found(source: str, targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hybrid_engine" / "planning" / "module.py"
    file.parent.mkdir(parents=True)
    for name in ("hybrid_engine/worker.py", "hybrid_engine/records/regions.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    file.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "REPO_ROOT", tmp_path)
    assert [found.target for found in imports_of(file)] == targets
