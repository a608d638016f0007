"""Whether a value of a configuration file is of the type that megatron-core's source says a field has.

The source is read, not imported: a configuration is checked before any engine loads. dtypes and members of enums are
given by name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Optional, Union

import pydantic

from hybrid_engine.config.values import Dtype

_PLAIN: Final[dict[str, Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list[pydantic.JsonValue],
    "dict": dict[str, pydantic.JsonValue],
    "None": None,
}

_GENERIC: Final[dict[str, Any]] = {
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
    **dict.fromkeys(("List", "list"), list),
    **dict.fromkeys(("Tuple", "tuple"), tuple),
    **dict.fromkeys(("Dict", "dict"), dict),
}

Members = Callable[[str], Sequence[str]]
"""Name of an enum -> names of its members; none for what is not one."""


class _NotAValueError(Exception):
    """No configuration file can hold an object of this type."""


def type_problem(value: pydantic.JsonValue, annotation: str, default: object, members: Members) -> str | None:
    """What is wrong with `value` for a field of this annotation and default, as source text; None if nothing is."""
    try:
        expected = _type_of(ast.parse(annotation, mode="eval").body, members)
    except _NotAValueError as error:
        return f"the field takes {error}, which a configuration file cannot give"
    if default is None:  # also where the annotation forgets to say so
        expected = _GENERIC["Optional"][expected]
    adapter = pydantic.TypeAdapter(expected, config=pydantic.ConfigDict(allow_inf_nan=False))
    try:
        adapter.validate_json(json.dumps(value), strict=True)  # JSON: a list may stand for a tuple
    except pydantic.ValidationError as error:
        return "; ".join(dict.fromkeys(found["msg"] for found in error.errors(include_url=False)))
    return None


def _type_of(node: ast.expr, members: Members) -> Any:
    """The type that an annotation describes."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name]
        case ast.Attribute(attr="dtype"):
            return Dtype
        case ast.BinOp(op=ast.BitOr()):
            return _type_of(node.left, members) | _type_of(node.right, members)
        case ast.Subscript(value=ast.Name(id=name)):
            return _generic(name, node.slice, members)
        case ast.Name(id=name) if names := members(name):
            return _GENERIC["Literal"][tuple(names)]
    raise _NotAValueError(ast.unparse(node))


def _generic(name: str, inner: ast.expr, members: Members) -> Any:
    if name not in _GENERIC:
        raise _NotAValueError(name)
    if name == "Literal":
        return _GENERIC[name][ast.literal_eval(inner)]
    elements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    types = [
        ... if ast.unparse(element) == "..." else _type_of(element, members)  # of a tuple of any length
        for element in elements
    ]
    return _GENERIC[name][types[0] if len(types) == 1 else tuple(types)]
