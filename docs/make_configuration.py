"""Makes docs/configuration.md from the configuration models, docs/constraints.md from the rules, and
docs/megatron_fields.md from the list of reviewed fields.

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
from hybrid_engine.config.constraints import CONSTRAINTS
from megatron_patches.review import function_fields
from megatron_patches.review.verdicts import FieldReview, review_of, reviewed_versions


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
    """What of Megatron's configuration is refused, and how the next version is reviewed."""
    refusals: dict[tuple[str, str], dict[str, FieldReview]] = {}
    for version in reviewed_versions():
        for section, fields in review_of(version).sections.items():
            for field, found in fields.items():
                if found.verdict == "refused":
                    refusals.setdefault((section, field), {})[version] = found
    rows = ["| field | in | may be | because |", "|---|---|---|---|"]
    for (section, field), by_version in refusals.items():
        found = next(iter(by_version.values()))
        may_be = ", ".join(f"`{value}`" for value in found.accepted)
        rows.append(f"| `{section}.{field}` | {_span(list(by_version))} | {may_be} | {found.reason} |")
    function = textwrap.fill(", ".join(f"`{name}`" for name in _function_fields()), 119)
    return _FIELDS.format(versions=", ".join(reviewed_versions()), function=function, table="\n".join(rows))


def _function_fields() -> dict[str, None]:
    """Collect the entries of all versions, each once."""
    sections = ("TransformerConfig", "GPTModel")
    return {name: None for one in sections for version in reviewed_versions() for name in function_fields(one, version)}


def _span(versions: list[str]) -> str:
    """Of consecutive reviewed versions."""
    if versions[-1] == reviewed_versions()[-1]:
        return f"{versions[0]} on"
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


_FIELDS = """# Megatron's configuration fields

Every version of megatron-core brings fields that may lay weights out otherwise, keep them elsewhere, or change them at
other times. They were read in the sources of {versions}: each is harmless, handled,
refused, or part of what a model computes, with the reason, in
[reviewed.yaml](../megatron_patches/review/reviewed.yaml). It covers TransformerConfig and its subclasses, the
configurations of DDP and the optimizer, and the arguments of GPTModel and HybridModel.

A field that is refused, or that is in no review and not at Megatron's default, is an error on every rank, all of them
at once, before the first collective of a switch. With `--enable-resharding` it comes with Megatron's arguments, before
anything is built; otherwise when a `LiveModel` or `TrainEngine` is made. For a field that is in no review
`generate_config.allow_unreviewed: [name]`, or the argument of that name, goes on and logs a warning: do that if you
know that the field leaves weights where they are. Refused fields cannot be allowed.

A field that is part of what a model computes goes with any switch; but vLLM computes what config.json asks for. With
`--enable-resharding` and `attach` each of them must have the value that megatron-core itself derives from the model,
which is its default where the model says nothing. Rotary frequencies are read off the model once it is built.

{function}.

## Refused

{table}

## Reviewing a new version

1. Get its wheel, without installing it, and print what is new, gone or of another default:

       pip download --no-deps --ignore-requires-python --python-version 3.12 --only-binary :all: megatron-core==VERSION
       python -m megatron_patches review megatron_core-VERSION-*.whl

   A folder with `megatron/core` and the number of the installed version will do, too. The command exits with 1 as long
   as something is left to review.
2. Read each new field where it is used; the files and lines are printed. Ask: does a weight get another name, shape,
   order of rows or dtype? Does it lie elsewhere than in DDP's buffers, twice, or for some time only? Does anything but
   an optimizer step write to it? Is an address kept that a switch gives back? Then: does the model compute something
   else? Of a new default: does the old verdict still hold?
3. Add the version to reviewed.yaml: `python -m megatron_patches review --yaml …` prints what to fill in. A verdict that
   is no longer right is given again under the new version, and so is that of a refused field with another default.
4. The tests in `tests/megatron_patches/review` compare the list with the installed version;
   `make core-tests MEGATRON=VERSION` does so for another one. Run `make docs`.
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
