"""Makes docs/configuration.md from the configuration models, their rules, and Megatron's fields.

The sections between the keys and the rules are written by hand.

Run `make docs` after a change; a test compares.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Literal, get_args, get_origin

import pydantic
import yaml

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
from megatron_patches.refused_fields import READ_OFF_THE_MODEL, REFUSED

PAGE = Path(__file__).parent / "configuration.md"


def texts() -> dict[Path, str]:
    """Return the whole page."""
    actor = (ActorConfig, OptimizerConfig, ScheduleConfig, LoraConfig, OverridesConfig, FsdpConfig)
    sections = (HybridConfig, *actor, GenerateConfig, CriticConfig)
    keys = "\n".join(_section(section) for section in sections)
    return {PAGE: f"{_INTRODUCTION}\n{keys}\n{_by_hand()}{_rules()}\n{_fields()}"}


def _by_hand() -> str:
    """Return the sections of the page that are written by hand, between the keys and the rules."""
    written = PAGE.read_text()
    return written[written.index("## Recomputation") : written.index("## Rules")]


def _rules() -> str:
    """Return the list of rules that a job's sizes must keep, with a line for each key."""
    notes = {"": "", "here": "¹", "anywhere": "²", "stored": "³"}
    rules: dict[str, list[str]] = {}
    for constraint in CONSTRAINTS:
        if not constraint.key.endswith(_OF_A_LAYOUT):
            continue  # an error prints it
        rules.setdefault(constraint.key, []).append(constraint.rule + notes[constraint.computing])
    rows = [f"- `{key}`: {' '.join(sentences)}" for key, sentences in rules.items()]
    return _RULES + "\n".join(rows) + "\n"


def _fields() -> str:
    """Return the tables of Megatron's refused fields, and the list of those read off the model."""
    rows: list[str] = []
    for section, refused_fields in REFUSED.items():
        fields: dict[tuple[str, str], list[str]] = {}
        for field, refused in refused_fields.items():
            allowed = ", ".join(f"`{value}`" for value in refused.accepted)
            until = f"; any since {refused.until.removesuffix('.0')}" if refused.until else ""
            fields.setdefault((allowed + until, refused.reason), []).append(f"`{field}`")
        rows += [f"\n| field of `{section}` | allowed | why |", "|---|---|---|"]
        rows += [
            f"| {', '.join(names)} | {allowed} | {reason} |"
            for (allowed, reason), names in fields.items()
        ]
    return _FIELDS.format(read=_wrapped(READ_OFF_THE_MODEL), refused="\n".join(rows))


def _wrapped(names: tuple[str, ...]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 119)


_INTRODUCTION = """# Configuration

```yaml
model: Qwen/Qwen3-8B  # the only required key
actor_config: {tensor_model_parallel_size: 8}
generate_config: {infer_tensor_parallel_size: 4, max_model_len: 4096}
```

is read by `load_config`, `train`, `attach` and the commands. A wrong key or value is
[answered](errors.md#errors-and-runs-that-do-not-learn) with key, problem and remedy; `hybrid-engine plan job.yaml --ranks
N` checks all [rules](#rules) in a second. Beside the keys: [other settings of Megatron](#overrides) and [of
vLLM](#vllms-other-settings), [environment variables](#environment-variables), and [fields of
Megatron](#megatrons-configuration-fields) that do not go with a switch.
"""

_RULES = """## Rules

All broken rules are reported at once, before a process group exists, each with key, numbers and the rule itself as remedy.
Those of sizes, for a layout that fits at once (¹: only where this package trains, not in a loop of your own or in
`verify`; ²: not in `verify`; ³: as ¹, and not of [a model that is passed](rl.md#lora)):

"""
_OF_A_LAYOUT = ("parallel_size", "sequence_parallel", "seq_length", "replicas", "params_dtype")
"""Ends of keys whose rules the page has."""

_FIELDS = """## Megatron's configuration fields

Fields that are not listed here pass: the addresses of weights are compared in every switch, and log-probabilities at
the first ([check_compute](failures.md#another-function)). Those that are not at Megatron's default are named in a debug
line.

### Refused

Other values than these are errors on every rank: with `--enable-resharding` when arguments are parsed, in
`actor_config.overrides` with the configuration, otherwise when a `LiveModel` or `TrainEngine` is made.

{refused}

### Part of what a model computes

With `--enable-resharding` and `attach`, each must have the value that megatron-core derives from the model, or its
default where the model has none; an error names those that have not. They are sizes, norms, biases, attention (windows,
scale, heads, latent vectors), activation, rotary settings and routing. Rotary frequencies are read from the built model.

### Read from the model

They change the layout of weights, which is read from the live model. In `actor_config.overrides` they are refused,
since a plan would not know:

{read}.
"""

# Page, and optionally a section, that a description names.
_PAGE = re.compile(r"\b((\w+)\.md(?:#[\w-]+)?)")


def _section(section: type) -> str:
    rows = ["| key: default | meaning |", "|---|---|"]
    for key, field in section.model_fields.items():
        default = "" if field.is_required() else _shown(field.default)
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        meaning = _PAGE.sub(r"[\2](\1)", meaning) + _choices(field.annotation, meaning)
        rows.append(f"| `{key}{default}` | {meaning} |")
    return f"{_heading(' '.join(section.__doc__.split()))}\n\n" + "\n".join(rows) + "\n"


def _heading(docstring: str) -> str:
    """Return a section's heading, its name, and the rest of its docstring as a paragraph."""
    found = re.fullmatch(r"(`.+?`(?:, or `.+?`)?)[:,] (.*)", docstring)
    if not found:
        return f"## Keys at the top\n\n{docstring}"
    name, rest = found.groups()
    return f"## {name}\n\n{rest[0].upper()}{rest[1:]}"


def _shown(default: object) -> str:
    """Return a default as YAML shows it after the key; empty if there is none."""
    if default is None:
        return ""
    if isinstance(default, pydantic.BaseModel):
        return ": {}"
    if isinstance(default, str):
        return f": {default}" if yaml.safe_load(default) == default else f': "{default}"'
    return ": " + re.sub(r"^(\d+)e", r"\1.0e", json.dumps(default))  # YAML reads 1e-6 as text.


def _choices(annotation: object, meaning: str) -> str:
    """Return the values of a Literal, also an optional one, unless the description names all."""
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) is not Literal:
            continue
        values = get_args(option)
        return "" if all(value in meaning for value in values) else f" One of: {', '.join(values)}."
    return ""


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
