"""`env`: facts of this machine, as text or JSON; the work is done by verification/machine.py."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybrid_engine.cli.output import writing


def env(as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> None:
    """Print what decides whether the GPU paths work here, for a bug report: GPUs, driver, packages, limits.

    In a checkout `make gpu-check` tries these paths; docs/gpu.md says how.
    """
    from hybrid_engine.verification.machine import facts_of, this_machine

    facts = facts_of(this_machine())
    with writing():
        typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(": ".join(each) for each in facts.items()))
