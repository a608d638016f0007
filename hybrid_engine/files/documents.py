"""Reads the YAML and JSON files of users: returns a value, or raises a ConfigError that names the file."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ArgumentError, ConfigError, Violation, clipped, shortened
from hybrid_engine.files.reading import read_regular

MOST_YAML_BYTES = 256 * 1024
MOST_JSON_BYTES = 16 * 1024**2
MOST_BYTES = 1024**3
"""Default limit of `read_text`."""
_KEY = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)
_NO_VALUE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors of the parsers, beside their own errors, for invalid texts: `!!bool x`, `!!int ""`, [[[[…"""


def given_path(path: object, key: str) -> Path:
    """A path that a call is given, its `~` a home directory as in a shell. Raises ArgumentError for what is no path."""
    with suppress(RuntimeError):  # nobody has the name after the ~
        if isinstance(path, str | os.PathLike):
            name = os.fspath(path)
            if isinstance(name, str) and name and "\0" not in name:
                return Path(name).expanduser()
    raise ArgumentError([Violation(key, f"{shortened(path)} is not a path", "Pass a string or a pathlib.Path")])


def read_text(path: str | Path, key: str, remedy: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file. Raises ConfigError under `key`.

    Args:
        path: of the file.
        key: the configuration key or option that names it.
        remedy: what to do when the file does not exist.
        most_bytes: largest size.
    """
    shown = clipped(str(path))
    try:
        content = read_regular(path, most_bytes)
    except (OSError, ValueError) as error:  # ValueError: also a name with a NUL
        reason = getattr(error, "strerror", None) or clipped(str(error))
        raise ConfigError([Violation(key, f"{shown} cannot be read: {reason}", remedy)]) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{shown} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
        raise ConfigError([Violation(key, problem, "Save it as UTF-8")]) from None


def read_yaml(path: str | Path, key: str, remedy: str = "Name a YAML file") -> dict[Any, Any]:
    """Return the mapping in a YAML file, whose keys are names. Raises ConfigError under `key`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that a mapping has twice, which YAML forbids and its reader overlooks."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(name.value for name, _ in node.value if name.value != "<<")
            if repeated := next((name for name, count in keys.items() if count > 1), None):
                raise ValueError(f"{shortened(repeated)} is there twice (line {node.start_mark.line + 1} and below)")
            return super().construct_mapping(node, deep)

    text = read_text(path, key, remedy, MOST_YAML_BYTES)
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise ConfigError([Violation(key, f"{path} is not YAML: {_reason(error)}", "Correct the file")]) from None
    section = _mapping(value, path, key)
    if foreign := [name for name in section if not (isinstance(name, str) and _KEY.fullmatch(name))]:
        # not repeated: the lines of /etc/shadow are such keys
        problem = f"{path} has {len(foreign)} top-level keys that cannot be names of settings"
        raise ConfigError([Violation(key, problem, remedy)])
    return section


def section_at(values: dict[Any, Any], names: Iterable[str]) -> Any:
    """The section inside sections of these names, made where there is none; None inside what is no section."""
    section: Any = values
    for name in names:
        section = section.setdefault(name, {}) if isinstance(section, dict) else None
    return section


def apply_overrides(values: dict[Any, Any], overrides: Sequence[str]) -> Iterator[Violation]:
    """Put each `section.key=value` into a file's values as if it stood there; yields what cannot be."""
    import yaml

    for text in overrides:
        name, equals, value = text.partition("=")
        *sections, key = name.split(".")
        if not equals or not all((*sections, key)):
            remedy = "Write KEY=VALUE, e.g. actor_config.tensor_model_parallel_size=4"
            yield Violation(shortened(text), "is not an override", remedy)
            continue
        section = section_at(values, sections)
        if not isinstance(section, dict):
            yield Violation(clipped(name), f"{clipped('.'.join(sections))} is no section", "Name a key of a section")
            continue
        try:
            section[key] = yaml.safe_load(value)
        except (yaml.YAMLError, *_NO_VALUE) as error:
            problem = f"{shortened(value)} cannot be read: {_reason(error)}"
            yield Violation(clipped(name), problem, "Write it as in the file")


def read_json(path: str | Path, key: str, remedy: str) -> dict[Any, Any]:
    """Return the mapping in a JSON file. Raises ConfigError under `key`."""
    text = read_text(path, key, remedy, MOST_JSON_BYTES)
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except _NO_VALUE as error:
        raise ConfigError([Violation(key, f"{path} is not JSON: {_reason(error)}", "Correct the file")]) from None
    return _mapping(value, path, key)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises ValueError where a key has two values: readers would take one of them without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"{shortened(key)} is there twice, as {shortened(found[key])} and {shortened(value)}")
        found[key] = value
    return found


def _mapping(value: Any, path: str | Path, key: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise ConfigError([Violation(key, f"{path} must hold keys and values, found {kind}", "Write `key: value`")])
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return clipped(problem) + ("" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})")
