"""Record of all names of the product that programs and files of users refer to.

`tests/recorded/interface.json` is read by tests/test_interface.py, so that a name can disappear or
change only in a commit that also changes the record:

    python -m tests.harness.interface --record

    exports      public names of each package that has `__all__`
    keys         configuration keys of a job and of both loops, with their defaults
    commands     options of each command of `hybrid-engine`
    report       fields of the report of a switch
    codes        codes of errors and violations, by class, read from the sources
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import typer.main

REPO_ROOT = Path(__file__).resolve().parents[2]
RECORDED = REPO_ROOT / "tests" / "recorded" / "interface.json"
PROGRAMS = ("hybrid_engine", "megatron_patches")


def interface() -> dict[str, Any]:
    """Return the document as it follows from the sources now."""
    from hybrid_engine.config import HybridConfig
    from hybrid_engine.rl import GrpoConfig, PpoConfig
    from hybrid_engine.switch.report import ReshardReport

    sections = {"": HybridConfig, "grpo.": GrpoConfig, "ppo.": PpoConfig}
    return {
        "exports": dict(_exports()),
        "keys": {
            prefix + key: default
            for prefix, section in sections.items()
            for key, default in _keys(section)
        },
        "commands": _commands(),
        "report": [field.name for field in dataclasses.fields(ReshardReport)],
        "codes": _codes(),
    }


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for program in PROGRAMS:
        for path in sorted((REPO_ROOT / program).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def _exports() -> Iterator[tuple[str, list[str]]]:
    """Yield (module, names of its `__all__`)."""
    for path, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = path.relative_to(REPO_ROOT).as_posix()
                yield module, sorted(ast.literal_eval(node.value))


def _keys(section: type[pydantic.BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, default) of a section and of the sections inside it."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            yield from ((f"{name}.{key}", default) for key, default in _keys(inner))
        else:
            yield name, "required" if field.is_required() else repr(field.default)


def _commands() -> dict[str, list[str]]:
    """Return the options of each command."""
    from hybrid_engine.tools.cli import app

    group: Any = typer.main.get_command(app)
    commands = {"": group, **group.commands}
    return {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands.items()
    }


def _codes() -> dict[str, list[str]]:
    """Return the codes that each class of errors is raised with."""
    codes = defaultdict[str, set[str]](set)
    for _, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not (called := constructed(node)):
                continue
            for keyword in node.keywords:
                is_literal = isinstance(keyword.value, ast.Constant)
                if keyword.arg == "code" and is_literal and isinstance(keyword.value.value, str):
                    # A constraint is raised as violations.
                    codes[called.replace("Constraint", "Violation")].add(keyword.value.value)
    return {name: sorted(values) for name, values in sorted(codes.items())}


def constructed(call: ast.Call) -> str:
    """Return the name of what a call constructs; "Violation" for ConfigError.of."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(
            attr="of", value=ast.Name(id="ConfigError" | "ArgumentError" | "BatchError")
        ):
            return "Violation"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the recorded interface of the product.")
    parser.add_argument("--record", action="store_true", help="write it to the record")
    options = parser.parse_args()
    text = json.dumps(interface(), indent=1, sort_keys=True) + "\n"
    if options.record:
        RECORDED.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
