"""The import floors of the design: allowed imports of each module, checked in the sources."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hybrid_engine
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.tools.programs import run_python

ENGINE = "hybrid_engine"
PATCHES = "megatron_patches"

# Bottom to top. A module imports from its floor and from lower ones. Packages have no import cycles
# either.
FLOORS = (
    ("errors", "files", "messages", "records", "ranks"),
    ("planning", "memory", "tracing"),
    ("models", "layouts", "ports", "transports"),
    ("config", "compute_check"),
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
# Imports besides the standard library; the longest name that matches a module counts. Without
# torch: pure.
OUTSIDE = {
    "errors": set(),
    "files": {"huggingface_hub", "yaml"},
    "messages": {"msgspec"},
    "records": {"msgspec", "numpy"},
    "ranks": {"torch", "xxhash"},
    "models": set(),
    "models.config_json": {"huggingface_hub", "transformers"},
    "models.derived": {"torch", "transformers"},
    "planning": {"numpy", "scipy"},
    "memory": {"cuda", "numpy", "torch"},
    "tracing": {"torch"},
    "layouts": {"numpy"},
    "ports": {"torch"},
    "compute_check": {"torch"},
    "config": {"pydantic"},
    "config.override_rules": {
        "megatron_patches",
        "pydantic",
    },  # inside a function, since it needs torch
    "tools": set(),
    "tools.plan": {"numpy"},
    "transports": {"msgspec", "numpy", "torch"},
    "transports.tile_kernel": {"triton"},  # imported inside a function, on a GPU
    "transports.runs": {"numpy", "torch", "triton"},
    "switch": {"numpy", "torch"},
    "switch.report": set(),
    "switch.states": set(),
    "backends": {"torch"},
    "backends.fsdp": {"packaging", "peft", "torch", "transformers"},
    "backends.huggingface": {"huggingface_hub", "numpy", "rich", "safetensors", "torch"},
    "backends.megatron": {"megatron", "megatron_patches", "packaging", "pydantic", "torch"},
    "backends.vllm": {"PIL", "numpy", "pydantic", "torch", "transformers", "vllm"},
    "backends.vllm.engine_settings": {"pydantic"},
    "serving": {"msgspec", "ray", "requests", "torch", "urllib3"},
    "vllm_plugin": {"vllm"},
    "assembly": {"torch"},
    "hybrid_engine": {"torch"},
    "attaching": {"megatron_patches", "pydantic", "torch"},
    "megatron_script": {"megatron_patches", "torch"},
    "trainer": {"numpy", "torch"},
    "trainer.fsdp": {"torch"},
    "trainer.learning_rate": {"megatron"},  # imported inside a function, for a schedule
    "trainer.megatron": {"megatron", "megatron_patches", "torch"},
    "rl": {"pydantic", "torch", "transformers"},
    "rl.rewards": {"math_verify", "torch"},
    "rl.run_settings": {"datasets", "pydantic"},
    "rl.completion_log": {"rich", "torch"},
    "rl.terminal": {"rich"},
    "integrations": {
        "ray",
        "verl",
    },  # in modules that verl imports; other frameworks are imported by name
    "tools.verify": {"numpy", "safetensors", "torch", "transformers"},
    "tools.verify.cases": set(),
    "tools.cli": {"rich", "typer"},
    "tools.cli.from_verl": {"megatron_patches", "yaml"},
    # torch inside functions: `plan` has none
    "tools.cli.run_command": {"torch", "typer"},
    "tools.cli.train_command": {"torch", "typer"},
}
# CPU stand-ins, which are never imported with a GPU.
STAND_INS = ("megatron_patches.cpu", "hybrid_engine.backends.vllm.cpu")
# Modules that may read the rank or world size from torch.distributed: they create a job, start its
# ranks or read Megatron's parallel state, which is global too. All others use the `Job`.
READ_GLOBAL_RANK = (
    "hybrid_engine.ranks.world",
    "hybrid_engine.tools.verify.verify",
    "hybrid_engine.backends.megatron.model_tensors",
    "hybrid_engine.backends.megatron.live_model",
)
# The first two contain private names of torch with their reasons; the third has an operator with
# such a name.
TORCH_INTERNALS = (
    "hybrid_engine.ranks.torch_internals",
    "hybrid_engine.backends.fsdp.internals",
    "hybrid_engine.backends.vllm.weights.tracing",
)
# Modules that load without either engine.
WITHOUT_ENGINES = tuple(
    f"hybrid_engine.{name}"
    for name in FLOOR_OF
    if name not in ("backends", "tools", "__main__", "")
)


@dataclass(frozen=True)
class Import:
    """An import in a source file, including imports inside functions and for type checking."""

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
    """Return all nodes of a module."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import; relative ones as absolute names."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else ""
            )
            origin = ".".join(part for part in (base, node.module) if part)
            targets = [
                f"{origin}.{alias.name}" if is_module(origin, alias.name) else origin
                for alias in node.names
            ]
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
    return [imported for path in sources(package) for imported in imports_of(path)]


def below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def part_of(module: str) -> str:
    """Return the top-level part of the engine to which a module belongs; "" for `hybrid_engine`."""
    return module.removeprefix(ENGINE).removeprefix(".").partition(".")[0]


def import_cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the nodes of an import cycle; empty without one."""
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
    """New top-level parts need a floor; removed ones must not keep theirs."""
    assert set(FLOOR_OF) == {part_of(module_name(path)) for path in sources(ENGINE)}


def test_imports_go_downward() -> None:
    upward = []
    for imported in all_imports(ENGINE):
        if imported.package == ENGINE:
            source = part_of(imported.module)
            target = part_of(imported.target)
            if target and target != source and FLOOR_OF[target] > FLOOR_OF[source]:
                upward.append(str(imported))
    assert upward == []


@pytest.mark.parametrize("package", [ENGINE, PATCHES])
def test_no_import_cycles(package: str) -> None:
    """Neither modules nor folders, at any depth; imports inside functions count."""
    edges = [(edge.module, edge.target) for edge in all_imports(package) if edge.package == package]
    assert import_cycle(edges) == []
    for depth in (2, 3, 4):
        folders = [tuple(".".join(name.split(".")[:depth]) for name in edge) for edge in edges]
        assert import_cycle(folders) == []


def entry_of(module: str) -> str:
    """Return the entry of OUTSIDE that applies to a module; "" for none."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in OUTSIDE), "")


def test_packages_import_what_is_listed() -> None:
    """Unused entries fail as well, since they would hide a new import."""
    internal = {ENGINE, *sys.stdlib_module_names}
    used: dict[str, set[str]] = {name: set() for name in OUTSIDE}
    unlisted = []
    for imported in all_imports(ENGINE):
        if imported.package not in internal:
            entry = entry_of(imported.module)
            if imported.package not in OUTSIDE.get(entry, ()):
                unlisted.append(str(imported))
            used.setdefault(entry, set()).add(imported.package)
    assert unlisted == []
    assert used == OUTSIDE


def test_backends_do_not_import_each_other() -> None:
    backends = ("hybrid_engine.backends.megatron", "hybrid_engine.backends.vllm")
    crossing = [
        str(imported)
        for imported in all_imports(ENGINE)
        for backend, other in (backends, backends[::-1])
        if below(imported.module, backend) and below(imported.target, other)
    ]
    assert crossing == []


def test_stand_ins_for_gpus_are_imported_lazily() -> None:
    """Only inside functions, or by each other. `megatron_patches.patch` names a module as text."""
    at_once = [
        f"{module_name(path)} imports {target}"
        for path in (*sources(ENGINE), *sources(PATCHES))
        for node in ast.iter_child_nodes(nodes_of(path)[0])
        if isinstance(node, ast.ImportFrom) and node.module
        for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        if any(below(target, home) and not below(module_name(path), home) for home in STAND_INS)
    ]
    assert at_once == []


def test_patches_do_not_import_the_engine() -> None:
    forbidden = (ENGINE, "vllm", "examples")
    assert [
        str(imported) for imported in all_imports(PATCHES) if imported.package in forbidden
    ] == []


@pytest.mark.slow
def test_all_but_the_backends_loads_without_megatron_and_vllm() -> None:
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"sys.modules[{engine!r}] = None" for engine in ("megatron", "vllm")),
            *(f"importlib.import_module({module!r})" for module in WITHOUT_ENGINES),
        ]
    )
    run_python("-c", code, status=0)


def test_ranks_come_from_the_job() -> None:
    calls = [
        f"{module_name(path)}:{node.lineno} calls {node.func.attr}"
        for path in sources(ENGINE)
        if not any(below(module_name(path), home) for home in READ_GLOBAL_RANK)
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
        if node.func.attr in ("get_rank", "get_world_size")
    ]
    assert calls == []


def private_names_of_torch(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield private names that are imported, or reached through modules and classes of torch.

    Attributes of objects are not included.
    """
    roots: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots |= {alias.asname or "torch" for alias in node.names if below(alias.name, "torch")}
        elif isinstance(node, ast.ImportFrom) and below(node.module or "", "torch"):
            roots |= {alias.asname or alias.name for alias in node.names}
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
        ):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in roots:
                yield node.attr


def test_private_names_of_torch_are_in_their_modules() -> None:
    elsewhere = [
        f"{module_name(path)}: {name}"
        for path in sources(ENGINE)
        if module_name(path) not in TORCH_INTERNALS
        for name in private_names_of_torch(nodes_of(path))
    ]
    assert elsewhere == []


@pytest.mark.slow
@pytest.mark.parametrize("name", hybrid_engine.__all__)
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(hybrid_engine, name).__name__.endswith(name)
