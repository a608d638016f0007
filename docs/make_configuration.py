"""Makes docs/configuration.md from the configuration models, their rules, and the list of Megatron's fields.

Run `make docs` after a change; a test compares.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Literal, get_args, get_origin

import pydantic

from hybrid_engine.config import (
    ActorConfig,
    CriticConfig,
    FsdpConfig,
    GenerateConfig,
    HybridConfig,
    LoraConfig,
    OptimizerConfig,
    OverridesConfig,
    ScheduleConfig,
)
from hybrid_engine.config.loading import CONSTRAINTS
from megatron_patches.refused_fields import FUNCTION_FIELDS, READ_OFF_THE_MODEL, REFUSED


def page() -> str:
    """Return the whole page."""
    actor = (ActorConfig, OptimizerConfig, ScheduleConfig, LoraConfig, OverridesConfig, FsdpConfig)
    sections = (HybridConfig, *actor, GenerateConfig, CriticConfig)
    keys = "\n".join(_section(section) for section in sections)
    return f"{_INTRODUCTION}\n{keys}\n{_rules()}\n{_fields()}"


def _rules() -> str:
    """Return the table of rules that a configuration must keep."""
    may_break = {"": "", "here": "weights alone, own loop", "anywhere": "weights alone"}
    rows = ["| key | rule | may break it |", "|---|---|---|"]
    rows += [
        f"| `{rule.key}` | {rule.rule} | {may_break[rule.computing]} |" for rule in CONSTRAINTS
    ]
    return _RULES + "\n".join(rows) + "\n"


def _fields() -> str:
    """Return the tables of Megatron's configuration fields: refused, compared, or read off the model."""
    rows = ["| field | may be | because |", "|---|---|---|"]
    for section, fields in REFUSED.items():
        for field, found in fields.items():
            may_be = ", ".join(f"`{value}`" for value in found.accepted)
            until = f" (before {found.until.removesuffix('.0')})" if found.until else ""
            rows.append(f"| `{section}.{field}`{until} | {may_be} | {found.reason} |")
    function, read = (_wrapped(names) for names in (FUNCTION_FIELDS, READ_OFF_THE_MODEL))
    return _FIELDS.format(function=function, read=read, table="\n".join(rows))


def _wrapped(names: tuple[str, ...]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 119)


_INTRODUCTION = """# Configuration

All [keys](#keys-at-the-top), the [rules](#rules) that they must keep, and the [fields of Megatron's own
configuration](#megatrons-configuration-fields) that do not go with a switch.
"""

_RULES = """## Rules

All rules are checked before a process group exists, and all violations are reported at once, each with its key, the
numbers and a remedy. Some do not apply where the training model only holds weights, as for `hybrid-engine verify`, or
where a loop of your own trains, as in Megatron's scripts and with `attach`.

The model's config.json is checked first, by its own keys. What depends on the device is checked on every rank when it
starts, before anything is built: whatever vLLM itself refuses of its settings, head sizes for which its attention on
CPU has no kernel, and a KV cache that is too small for one sequence of the longest length.

"""

_FIELDS = """## Megatron's configuration fields

Some fields of megatron-core's configuration change where weights are stored, how they are laid out, or what is
computed. They are listed in `megatron_patches`, as found in the sources of the tested versions. Every other field
passes, known or not: the addresses of the weights are compared in every switch, and vLLM's log-probabilities with the
trainer's at the first one (`check_compute`, [failures](failures.md#another-function)). Such fields that are not at
Megatron's default are named in a debug line.

### Refused

These are errors on every rank, all of them at once, before the first collective of a switch. With
`--enable-resharding` they come with Megatron's arguments, before anything is built; otherwise when a `LiveModel` or
`TrainEngine` is made. In `actor_config.overrides` they are refused with the configuration.

{table}

### Part of what a model computes

They go with any switch, but vLLM computes what config.json asks for. With `--enable-resharding` and `attach`, each of
them must have the value that megatron-core itself derives from the model, which is its default where the model says
nothing. Rotary frequencies are read from the model once it is built.

{function}.

### Read from the model

They change the layout of the weights, and the live model itself says how. In `actor_config.overrides` they are
refused, since a plan would not know:

{read}.
"""


def _section(section: type) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.default)}`"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {default} | {meaning}{_choices(field.annotation)} |")
    return f"{_heading(' '.join(section.__doc__.split()))}\n\n" + "\n".join(rows) + "\n"


def _heading(docstring: str) -> str:
    """Return a section's heading, which is its name, and the rest of its docstring as a paragraph."""
    found = re.fullmatch(r"(`.+?`(?:, or `.+?`)?)[:,] (.*)", docstring)
    if not found:
        return f"## Keys at the top\n\n{docstring}"
    name, rest = found.groups()
    return f"## {name}\n\n{rest[0].upper()}{rest[1:]}"


def _shown(default: object) -> str:
    return "{}" if isinstance(default, pydantic.BaseModel) else json.dumps(default)


def _choices(annotation: object) -> str:
    """The values of a Literal, also inside an optional one."""
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) is Literal:
            return f" One of: {', '.join(get_args(option))}."
    return ""


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(page())
