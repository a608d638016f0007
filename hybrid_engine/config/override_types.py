"""Whether a value of a configuration file is of the type that a field of megatron-core's configuration has.

dtypes and members of enums are given by name.
"""

from __future__ import annotations

import enum
import json
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import pydantic

from hybrid_engine.config.values import Dtype

_PLAIN: Final[dict[Any, Any]] = {
    **{kind: kind for kind in (bool, int, float, str, NoneType, ...)},
    list: list[pydantic.JsonValue],
    dict: dict[str, pydantic.JsonValue],
}


class _NotAValueError(Exception):
    """No configuration file can hold an object of this type."""


def type_problem(value: pydantic.JsonValue, annotation: Any, default: object) -> str | None:
    """What is wrong with `value` for a field of this type and default; None if nothing is."""
    try:
        expected = _json_type(annotation)
    except _NotAValueError as error:
        return f"the field takes {error}, which a configuration file cannot give"
    if default is None:  # also where the annotation forgets to say so
        expected |= None
    adapter = pydantic.TypeAdapter(expected, config=pydantic.ConfigDict(allow_inf_nan=False))
    try:
        adapter.validate_json(json.dumps(value), strict=True)  # JSON: a list may stand for a tuple
    except pydantic.ValidationError as error:
        return "; ".join(dict.fromkeys(found["msg"] for found in error.errors(include_url=False)))
    return None


def _json_type(kind: Any) -> Any:
    """The type of what a file gives for a field of this one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return kind
    if origin in (Union, UnionType):
        return reduce(or_, map(_json_type, inner))
    if origin in (list, tuple, dict):
        return origin[tuple(map(_json_type, inner))]
    if isinstance(kind, enum.EnumType):
        return Literal[tuple(kind.__members__)]
    if f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}" == "torch.dtype":
        return Dtype
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise _NotAValueError(getattr(kind, "__name__", str(kind)))
