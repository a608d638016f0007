"""Prints docs/configuration.md from the configuration models.

Run `make docs` after a change; a test compares.
"""

from __future__ import annotations

import json
from typing import Literal, get_args, get_origin

import pydantic

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, OptimizerConfig


def page() -> str:
    """The whole page."""
    sections = (HybridConfig, ActorConfig, OptimizerConfig, GenerateConfig)
    return "# Configuration\n\n" + "\n".join(_section(section) for section in sections)


def _section(section: type) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.default)}`"
        rows.append(f"| `{key}` | {default} | {field.description}{_choices(field.annotation)} |")
    return f"## {section.__doc__}\n\n" + "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    return "{}" if isinstance(default, pydantic.BaseModel) else json.dumps(default)


def _choices(annotation: object) -> str:
    """The values of a Literal, also inside an optional one."""
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) is Literal:
            return f" One of: {', '.join(get_args(option))}."
    return ""


if __name__ == "__main__":
    print(page(), end="")
