"""Makes docs/configuration.md from the configuration models and docs/constraints.md from the rules.

Run `make docs` after a change; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pydantic

from hybrid_engine.config import ActorConfig, FsdpConfig, GenerateConfig, HybridConfig, LoraConfig, OptimizerConfig
from hybrid_engine.config.constraints import CONSTRAINTS


def page() -> str:
    """The whole page."""
    sections = (HybridConfig, ActorConfig, OptimizerConfig, LoraConfig, FsdpConfig, GenerateConfig)
    return "# Configuration\n\n" + "\n".join(_section(section) for section in sections)


def constraints_page() -> str:
    """The rules that a configuration must keep."""
    rows = ["| key | rule | weights alone |", "|---|---|---|"]
    rows += [f"| `{rule.key}` | {rule.rule} | {'may break it' if rule.computing else ''} |" for rule in CONSTRAINTS]
    return (
        "# Constraints\n\n"
        "All rules are checked before a process group exists, and all violations are reported at once, each with its "
        "key, the numbers and a remedy. Each rule has a test that breaks it "
        "(`tests/hybrid_engine/config/test_constraints.py`). Where the training model only holds weights, as for "
        "`python -m hybrid_engine verify`, the marked rules do not apply.\n\n" + "\n".join(rows) + "\n"
    )


def _section(section: type) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.default)}`"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {default} | {meaning}{_choices(field.annotation)} |")
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
    docs = Path(__file__).parent
    (docs / "configuration.md").write_text(page())
    (docs / "constraints.md").write_text(constraints_page())
