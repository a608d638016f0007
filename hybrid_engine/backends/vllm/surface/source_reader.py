"""Reading a library's source without importing it: where a name is defined, what it takes, and what its code says.

Names are followed through re-exports, lazy tables of exports and base classes, as far as the source goes; what it takes
from elsewhere (torch, compiled modules) counts as there.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name is defined.

    Attributes:
        module: dotted name.
        node: a function, a class, a statement that assigns; None for a module, and for what is not in this source.
        is_method: whether a function is an attribute of a class.
    """

    module: str
    node: ast.AST | None = None
    is_method: bool = False


@dataclass(frozen=True)
class Signature:
    """What can be passed.

    Attributes:
        positional: names that can be passed by position, in order.
        required: those without a default, keyword-only ones too.
        keywords: all names that can be passed by name.
        takes_any: `*args` and `**kwargs`.
    """

    positional: tuple[str, ...]
    required: frozenset[str]
    keywords: frozenset[str]
    takes_any: tuple[bool, bool] = (False, False)

    def faults(self, num_positional: int, keywords: Iterable[str]) -> list[str]:
        """Why a call with so many positional arguments and these keywords would fail, in words."""
        given = {*keywords, *self.positional[:num_positional]}
        faults = [f"takes no {name}" for name in sorted({*keywords} - self.keywords) if not self.takes_any[1]]
        if num_positional > len(self.positional) and not self.takes_any[0]:
            faults.append(f"takes {len(self.positional)} positional arguments, not {num_positional}")
        return faults + [f"needs {name}" for name in sorted(self.required - given)]


class Source:
    """The source of one package in a directory, read file by file as names are asked for."""

    def __init__(self, directory: Path, package: str) -> None:
        """`directory`: in which `package/__init__.py` lies."""
        self._directory, self._package = directory, package
        self._module = cache(self._read)

    def find(self, target: str) -> Definition | None:
        """What ``module:attr.path`` names; None when there is no such name."""
        module, _, path = target.partition(":")
        found: Definition | None = Definition(module) if self._module(module) else None
        for name in filter(None, path.split(".")):
            found = self._attribute(found, name) if found is not None else None
        return found

    def signature(self, definition: Definition) -> Signature | None:
        """What a function, or a class as a function, takes; None where the source does not say."""
        node = definition.node
        if isinstance(node, ast.ClassDef):
            made = self._attribute(definition, "__init__")
            if made is not None and isinstance(made.node, Function):
                return self.signature(made)
            return self._signature_of_fields(definition)
        return _signature(node, definition.is_method) if isinstance(node, Function) else None

    def fields(self, definition: Definition) -> dict[str, bool]:
        """The annotated names of a class and of those it inherits from, first bases first, and which have a default."""
        fields: dict[str, bool] = {}
        for each in reversed(list(self._classes(definition))):
            assert isinstance(each.node, ast.ClassDef)
            annotated = (statement for statement in each.node.body if isinstance(statement, ast.AnnAssign))
            for statement in annotated:
                if isinstance(statement.target, ast.Name) and "ClassVar" not in ast.unparse(statement.annotation):
                    fields[statement.target.id] = statement.value is not None
        return fields

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self, module: str) -> _Module | None:
        if module.partition(".")[0] != self._package:
            return None
        path = self._directory.joinpath(*module.split("."))
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.is_file():
                return _Module(module, is_package, ast.parse(file.read_bytes()))
        return None

    def _attribute(self, owner: Definition, name: str) -> Definition | None:
        if isinstance(owner.node, ast.ClassDef):
            found = next((found for each in self._classes(owner) if (found := _in_class(each, name))), None)
            return Definition(object.__module__) if found is None and hasattr(object, name) else found
        if owner.node is not None:
            return None
        module = self._module(owner.module)
        if module is None:
            return Definition(f"{owner.module}.{name}")  # not in this source
        if (node := module.names.get(name)) is not None:
            return self._followed(module, node, name)
        submodule = f"{owner.module}.{name}"
        return Definition(submodule) if self._module(submodule) else None

    def _followed(self, module: _Module, node: ast.AST, name: str) -> Definition | None:
        """The definition behind an import, or behind an entry of a table of lazy exports."""
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
            return Definition(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            return self._imported(module.absolute(node.module or "", node.level), alias.name)
        if isinstance(node, ast.Constant):
            origin, _, attribute = str(node.value).partition(":")
            level = len(origin) - len(origin.lstrip("."))
            return self._imported(module.absolute(origin[level:], level), attribute or name)
        return Definition(module.name, node)

    def _imported(self, module: str, name: str) -> Definition | None:
        return self._attribute(Definition(module), name)

    def _classes(self, definition: Definition) -> Iterator[Definition]:
        """A class and those it inherits from, nearest first."""
        yield definition
        assert isinstance(definition.node, ast.ClassDef)
        for base in definition.node.bases:
            found = self._expression(definition.module, base.value if isinstance(base, ast.Subscript) else base)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self._classes(found)

    def _expression(self, module: str, node: ast.expr) -> Definition | None:
        if isinstance(node, ast.Name):
            return self._attribute(Definition(module), node.id)
        if isinstance(node, ast.Attribute):
            owner = self._expression(module, node.value)
            return None if owner is None else self._attribute(owner, node.attr)
        return None

    def _signature_of_fields(self, definition: Definition) -> Signature:
        fields = self.fields(definition)
        required = frozenset(name for name, has_default in fields.items() if not has_default)
        return Signature(tuple(fields), required, frozenset(fields))


@dataclass(frozen=True)
class _Module:
    """A parsed file."""

    name: str
    is_package: bool
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """Name -> the statement that defines it, or the string of a table of lazy exports; the last one counts."""
        names: dict[str, ast.AST] = {}
        for statement in _statements(self.tree.body):
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                pairs = zip(statement.value.keys, statement.value.values, strict=True)
                for key, value in pairs:
                    if isinstance(key, ast.Constant) and _is_export(value):
                        names.setdefault(str(key.value), value)
            names.update(dict.fromkeys(_defined(statement), statement))
        return names

    def absolute(self, module: str, level: int) -> str:
        """The name of a module that is imported here with so many leading dots."""
        if not level:
            return module
        parts = self.name.split(".")
        kept = parts[: len(parts) - level + self.is_package]
        return ".".join([*kept, *filter(None, [module])])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those inside conditions, not those inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, Function | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, inner, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, Function | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]


def _is_export(value: ast.expr) -> bool:
    """Whether this says where something is imported from at its first use: ".module:Name"."""
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and ":" in value.value.strip(":")


def _in_class(owner: Definition, name: str) -> Definition | None:
    """An attribute that a class defines, or that its methods set on `self`."""
    assert isinstance(owner.node, ast.ClassDef)
    found = None
    for statement in _statements(owner.node.body):
        if name in _defined(statement):
            found = Definition(owner.module, statement, is_method=isinstance(statement, Function))
    if found is not None:
        return found
    return next((Definition(owner.module, node) for node in ast.walk(owner.node) if _sets(node, name)), None)


def _sets(node: ast.AST, name: str) -> bool:
    """Whether this is the target of `self.name = …`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr != name:
        return False
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _signature(node: Function, is_method: bool) -> Signature:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    arguments = node.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    if is_method and "staticmethod" not in decorators:
        positional, required = positional[1:], required[1:]
    only = [each.arg for each in arguments.kwonlyargs]
    needed = [name for name, default in zip(only, arguments.kw_defaults, strict=True) if default is None]
    by_name = {*positional, *only} - {each.arg for each in arguments.posonlyargs}
    takes_any = (arguments.vararg is not None, arguments.kwarg is not None)
    return Signature(tuple(positional), frozenset({*required, *needed}), frozenset(by_name), takes_any)


def digest(node: ast.AST) -> str:
    """What the code says, in 12 digits: without comments, docstrings, layout, and what Python versions add to trees."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:12]


def _canonical(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_canonical(each) for each in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    parts = (
        f"{name}={_canonical(value)}" for name, value in fields.items() if value not in (None, []) and name != "ctx"
    )
    return f"{type(node).__name__}({','.join(parts)})"
