"""Readers of users' YAML and JSON files, with errors that name the file and the key."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    Violation,
    Violations,
    clipped,
    shortened,
)
from hybrid_engine.files.reading import read_regular

if TYPE_CHECKING:
    import yaml

MAX_YAML_NBYTES = 256 * 1024
MAX_JSON_NBYTES = 16 * 1024**2
MAX_NBYTES = 1024**3
"""Default limit of `read_text`."""
_KEY = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)
_INVALID_TEXT = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Builtin errors that parsers raise for invalid text: `!!bool x`, `!!int ""`, [[[[…"""


def given_path(path: object, key: str) -> Path:
    """Return a path argument as an absolute path, with a leading `~` expanded as in a shell.

    Absolute, because a function of the user may change the working directory later.

    Raises:
        ArgumentError: the value of `key` is not a path.
    """
    # RuntimeError: no user has the name after the ~.
    with suppress(RuntimeError):
        if isinstance(path, str | os.PathLike):
            name = os.fspath(path)
            if isinstance(name, str) and name and "\0" not in name:
                return Path(name).expanduser().absolute()
    raise ArgumentError.of(
        key,
        f"{shortened(path)} is not a path",
        "Pass a string or a pathlib.Path",
        code="not-a-path",
    )


def read_text(path: str | Path, key: str, remedy: str, most_bytes: int = MAX_NBYTES) -> str:
    """Return the text of a regular file.

    Args:
        path: path of the file.
        key: configuration key or option with the path.
        remedy: advice if the file does not exist.
        most_bytes: largest size.

    Raises:
        ConfigError: under `key`; the file cannot be read, is too large, or is not UTF-8.
    """
    shown = clipped(str(path))
    try:
        content = read_regular(path, most_bytes)
    # ValueError: not a regular file, too large, or a NUL in the name.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or clipped(str(error))
        raise ConfigError.of(
            key, f"{shown} cannot be read: {reason}", remedy, code="unreadable-file"
        ) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ConfigError.of(
            key,
            f"{shown} is not UTF-8 text: byte {error.start} is 0x{byte:02x}",
            "Save it as UTF-8",
            code="not-utf-8",
        ) from None


def read_yaml(path: str | Path, key: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file, which has names as keys.

    Raises:
        ConfigError: under `key`; the file cannot be read or is invalid.
    """
    import yaml

    remedy = "Name a YAML file"
    text = read_text(path, key, remedy, MAX_YAML_NBYTES)
    try:
        value = yaml.load(text, _yaml_loader())
    except (yaml.YAMLError, *_INVALID_TEXT) as error:
        raise ConfigError.of(
            key, f"{path} is not YAML: {_reason(error)}", "Correct the file", code="not-yaml"
        ) from None
    section = _mapping(value, path, key)
    unusable = [name for name in section if not (isinstance(name, str) and _KEY.fullmatch(name))]
    if unusable:
        # The message does not repeat the keys: the lines of /etc/shadow are such keys.
        raise ConfigError.of(
            key,
            f"{path} has {len(unusable)} top-level keys that cannot be names of settings",
            remedy,
            code="invalid-keys",
        )
    return section


@cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader that rejects repeated keys, which YAML forbids and PyYAML accepts."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(name.value for name, _ in node.value if name.value != "<<")
            for name, count in keys.items():
                if count > 1:
                    line = node.start_mark.line + 1
                    raise ValueError(f"{shortened(name)} is there twice (line {line} and below)")
            return super().construct_mapping(node, deep)

    return Loader


def section_at(values: dict[Any, Any], names: Iterable[str]) -> Any:
    """Return the nested section with these names, creating missing sections.

    None if a value on the way is not a section.
    """
    section: Any = values
    for name in names:
        section = section.setdefault(name, {}) if isinstance(section, dict) else None
    return section


def apply_overrides(values: dict[Any, Any], overrides: Sequence[str]) -> Violations:
    """Insert each `section.key=value` into a file's values, as if the file contained it.

    Yields a violation for each invalid override.
    """
    import yaml

    for text in overrides:
        name, equals, value = text.partition("=")
        *sections, key = name.split(".")
        if not equals or not all((*sections, key)):
            yield Violation(
                shortened(text),
                "is not an override",
                "Write KEY=VALUE, e.g. actor_config.tensor_model_parallel_size=4",
                code="not-an-override",
            )
            continue
        section = section_at(values, sections)
        if not isinstance(section, dict):
            yield Violation(
                clipped(name),
                f"{clipped('.'.join(sections))} is not a section",
                "Name a key of a section",
                code="not-a-section",
            )
            continue
        try:
            section[key] = yaml.load(value, _yaml_loader())
        except (yaml.YAMLError, *_INVALID_TEXT) as error:
            yield Violation(
                clipped(name),
                f"{shortened(value)} cannot be read: {_reason(error)}",
                "Write it as in the file",
                code="not-yaml",
            )


def read_json(path: str | Path, key: str, remedy: str) -> dict[Any, Any]:
    """Return the mapping in a JSON file.

    Raises:
        ConfigError: under `key`; the file cannot be read or is invalid.
    """
    text = read_text(path, key, remedy, MAX_JSON_NBYTES)
    try:
        value = json.loads(text, object_pairs_hook=_unambiguous)
    except _INVALID_TEXT as error:
        raise ConfigError.of(
            key, f"{path} is not JSON: {_reason(error)}", "Correct the file", code="not-json"
        ) from None
    return _mapping(value, path, key)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys with different values; the `object_pairs_hook` of `read_json`."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            first = shortened(values[key])
            raise ValueError(f"{shortened(key)} is there twice, as {first} and {shortened(value)}")
        values[key] = value
    return values


def _mapping(value: Any, path: str | Path, key: str) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    kind = "nothing" if value is None else f"a {type(value).__name__}"
    raise ConfigError.of(
        key,
        f"{path} must hold keys and values, found {kind}",
        "Write `key: value`",
        code="not-a-mapping",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # YAML's errors have a problem and a position.
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    mark = getattr(error, "problem_mark", None)
    position = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return clipped(problem) + position
