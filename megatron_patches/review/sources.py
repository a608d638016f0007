"""The configuration fields that a megatron-core declares, read from its sources with `ast`: nothing is imported.

A source is a wheel, a folder with `megatron/core` in it (a Megatron-LM checkout, an unpacked wheel), or the installed
package.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from megatron_patches.errors import ReviewError
from megatron_patches.review.verdicts import REQUIRED

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "TransformerConfig": (
        "transformer/transformer_config.py:TransformerConfig",
        "model_parallel_config.py:ModelParallelConfig",
        "transformer/transformer_config.py:MLATransformerConfig",
        "transformer/heterogeneous/heterogeneous_config.py:HeterogeneousTransformerConfig",
    ),
    "DistributedDataParallelConfig": ("distributed/distributed_data_parallel_config.py:DistributedDataParallelConfig",),
    "OptimizerConfig": ("optimizer/optimizer_config.py:OptimizerConfig",),
    "GPTModel": ("models/gpt/gpt_model.py:GPTModel",),
    "HybridModel": ("models/hybrid/hybrid_model.py:HybridModel",),
}
"""Configuration classes, and models for their arguments -> where their fields are declared, below `megatron/core`.

The first class that declares a field says what its default is.
"""

_ENUMS: Final = "transformer/enums.py"


@dataclass(frozen=True)
class DeclaredField:
    """A field as its class declares it.

    Attributes:
        section: of `SECTIONS`.
        name: of the field, or of a model's argument.
        annotation: its type, source text.
        default: a literal, or source text, or `REQUIRED`.
        text: what the source says about it.
        place: file and line, below `megatron/core`.
    """

    section: str
    name: str
    annotation: str
    default: object
    text: str
    place: str


class CoreSources:
    """The sources of one megatron-core.

    Args:
        root: the folder `megatron/core`.

    Raises:
        ReviewError: when that is not megatron-core.
    """

    def __init__(self, root: Traversable) -> None:
        self._root = root
        try:
            self.version = _version(ast.parse((root / "package_info.py").read_text(encoding="utf-8")))
        except (OSError, KeyError) as error:
            raise ReviewError(f"{root} is not megatron-core: {error}") from error

    def fields(self) -> list[DeclaredField]:
        """Every field of `SECTIONS`, each once. A class that this version does not have has none."""
        found: dict[tuple[str, str], DeclaredField] = {}
        for section, places in SECTIONS.items():
            for place in places:
                for field in self._declared(section, *place.split(":")):
                    found.setdefault((section, field.name), field)
        return list(found.values())

    def uses(self, name: str) -> list[str]:
        """Where the sources mention a name, but for the files that declare configurations: file and line."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return [
            f"{file}:{number}"
            for file, text in self._texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            if name in line and word.search(line)
        ]

    def members(self, enum: str) -> tuple[str, ...]:
        """Names of the members of an enum that annotations mention; none for a name that is not one."""
        try:
            tree = ast.parse((self._root / _ENUMS).read_text(encoding="utf-8"))
        except (FileNotFoundError, KeyError):  # KeyError: of a wheel
            return ()
        return tuple(
            statement.targets[0].id
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == enum
            for statement in node.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        )

    @cached_property
    def _texts(self) -> Mapping[str, str]:
        return {name: text for name, text in _python_files(self._root, "") if not name.endswith("_config.py")}

    def _declared(self, section: str, file: str, class_name: str) -> Iterator[DeclaredField]:
        try:
            tree = ast.parse((self._root / file).read_text(encoding="utf-8"))
        except (FileNotFoundError, KeyError):  # KeyError: of a wheel
            return
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                yield from _arguments(section, node, file) or _dataclass_fields(section, node, file)


def find_sources(source: str) -> CoreSources:
    """Of a wheel, a folder, or an installed version.

    Raises:
        ReviewError: when there is no such thing here, or it is not megatron-core.
    """
    path = Path(source)
    if path.is_dir():
        return CoreSources(path / "megatron" / "core")
    if path.is_file():
        try:
            return CoreSources(zipfile.Path(path) / "megatron" / "core")
        except zipfile.BadZipFile as error:
            raise ReviewError(f"{path} is not a wheel: {error}") from error
    installed = installed_sources()
    if installed is not None and installed.version == source:
        return installed
    raise ReviewError(
        f"{source} is neither a wheel nor a folder, and not the installed megatron-core "
        f"({'none' if installed is None else installed.version}); get its wheel: pip download --no-deps "
        f"--ignore-requires-python --python-version 3.12 --only-binary :all: megatron-core=={source}"
    )


def installed_sources() -> CoreSources | None:
    """Of the megatron-core that would be imported; None without one."""
    spec = importlib.util.find_spec("megatron")
    places = [] if spec is None else [Path(place) / "core" for place in spec.submodule_search_locations or ()]
    return next((CoreSources(place) for place in places if (place / "package_info.py").is_file()), None)


def _version(tree: ast.Module) -> str:
    values = {
        node.targets[0].id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values['PRE_RELEASE']}"


def _python_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _python_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")


def _dataclass_fields(section: str, node: ast.ClassDef, file: str) -> Iterator[DeclaredField]:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            annotation, default = ast.unparse(statement.annotation), _default(statement.value)
            place = f"{file}:{statement.lineno}"
            yield DeclaredField(section, statement.target.id, annotation, default, text, place)


def _arguments(section: str, node: ast.ClassDef, file: str) -> list[DeclaredField]:
    """Those of a model's constructor; a dataclass has none."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            given = statement.args
            defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
            both = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
            return [
                DeclaredField(
                    section,
                    arg.arg,
                    ast.unparse(arg.annotation) if arg.annotation else "",
                    _default(default),
                    "",
                    f"{file}:{arg.lineno}",
                )
                for arg, default in both[1:]
            ]
    return []


def _default(value: ast.expr | None) -> object:
    """A literal where the source has one, as YAML would give it back; else the source text."""
    if value is None:
        return REQUIRED
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if factory := given.get("default_factory"):
            return {"list": [], "dict": {}}.get(ast.unparse(factory), ast.unparse(factory))
        return _default(given.get("default"))
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)
    return list(literal) if isinstance(literal, tuple) else literal
