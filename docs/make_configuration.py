"""Makes docs/configuration.md from the configuration models, docs/constraints.md from the rules, and
docs/megatron_fields.md from the list of fields.

Run `make docs` after a change; a test compares.
"""

from __future__ import annotations

import json
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
from megatron_patches.review import FUNCTION_FIELDS, READ_OFF_THE_MODEL, REFUSED


def page() -> str:
    """The whole page."""
    actor = (ActorConfig, OptimizerConfig, ScheduleConfig, LoraConfig, OverridesConfig, FsdpConfig)
    sections = (HybridConfig, *actor, GenerateConfig, CriticConfig)
    return "# Configuration\n\n" + "\n".join(_section(section) for section in sections)


def constraints_page() -> str:
    """The rules that a configuration must keep."""
    may_break = {"": "", "here": "weights alone, own loop", "anywhere": "weights alone"}
    rows = ["| key | rule | may break it |", "|---|---|---|"]
    rows += [f"| `{rule.key}` | {rule.rule} | {may_break[rule.computing]} |" for rule in CONSTRAINTS]
    return (
        "# Constraints\n\n"
        "All rules are checked before a process group exists, and all violations are reported at once, each with its "
        "key, the numbers and a remedy. Each rule has a test that breaks it "
        "(`tests/hybrid_engine/config/test_constraints.py`). Some do not apply where the training model only holds "
        "weights, as for `hybrid-engine verify`, or where a loop of your own trains, as in Megatron's scripts and with "
        "`attach`.\n\n"
        "The model's config.json is checked first, by its own keys (`hybrid_engine/models/family_schemas.py`). What "
        "depends on the device is checked on every rank when it starts, before anything is built: whatever vLLM itself "
        "refuses of its settings (a longer context than the model's, a dtype, a quantization method), heads for which "
        "its attention on CPU has no kernel, and a KV cache that is too small for one sequence of the longest length "
        "(`hybrid_engine/backends/vllm/feasibility.py`).\n\n" + "\n".join(rows) + "\n"
    )


def fields_page() -> str:
    """What of Megatron's configuration is refused, compared or read."""
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


_FIELDS = """# Megatron's configuration fields

Some fields of megatron-core's configuration lay weights out otherwise, keep them elsewhere, or change what is computed.
They are listed in [fields.py](../megatron_patches/review/fields.py), as found in the sources of the tested versions.
Every other field passes, known or not: the addresses of the weights are compared in every switch, and vLLM's
log-probabilities with the trainer's at the first one (`check_compute`, [failures](failures.md)). Such fields
that are not at Megatron's default are named in a debug line.

## Refused

These are errors on every rank, all of them at once, before the first collective of a switch. With
`--enable-resharding` they come with Megatron's arguments, before anything is built; otherwise when a `LiveModel` or
`TrainEngine` is made. In `actor_config.overrides` they are refused with the configuration.

{table}

## Part of what a model computes

They go with any switch; but vLLM computes what config.json asks for. With `--enable-resharding` and `attach` each of
them must have the value that megatron-core itself derives from the model, which is its default where the model says
nothing. Rotary frequencies are read off the model once it is built.

{function}.

## Read off the model

They lay weights out otherwise, as the live model itself says; in `actor_config.overrides` they are refused, since a
plan would not know:

{read}.
"""


def _section(section: type) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.default)}`"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {default} | {meaning}{_choices(field.annotation)} |")
    return f"## {' '.join(section.__doc__.split())}\n\n" + "\n".join(rows) + "\n"


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
    (docs / "megatron_fields.md").write_text(fields_page())
