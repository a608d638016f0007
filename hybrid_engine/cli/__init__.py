"""The command line: `hybrid-engine plan …`, `verify …`, `certify …` and `env`; `python -m hybrid_engine` too.

    plan_command.py       `plan`: its options, checked; the work is done by advisor/
    from_verl.py          `plan --from verl`: a configuration of verl, read as one of this project
    search_output.py      `plan --search`: what it prints
    verify_command.py     `verify`: its options, checked, and its verdict; the work is done by verification/
    certify_command.py    `certify`: likewise
    options.py            what the commands' options have in common
    output.py             writing an answer, to whatever reads it

Exit status:
    0   the command succeeded and found nothing wrong
    1   `verify` or `certify` found a difference
    2   the request is invalid, and every reason was printed before anything started; or the answer could not be
        written
    3   `plan`: the job does not fit its devices or hosts, or with --search none does. `verify`, `certify`: the ranks
        or engines ended without a verdict; their output is printed
"""

from __future__ import annotations

from typing import Annotated

import typer

import hybrid_engine
from hybrid_engine.cli.certify_command import certify
from hybrid_engine.cli.output import write_answer
from hybrid_engine.cli.plan_command import plan
from hybrid_engine.cli.verify_command import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options off in narrow terminals
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hybrid-engine {hybrid_engine.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train with Megatron or FSDP2 and generate with vLLM in turn, on one set of devices."""


app.command()(plan)
app.command()(verify)
app.command()(certify)


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> None:
    """Print what decides whether the GPU paths work here, for a bug report: GPUs, driver, packages, limits.

    In a checkout `make gpu-check` tries these paths; docs/gpu.md says how.
    """
    from hybrid_engine.verification.machine import facts_of, this_machine

    facts = facts_of(this_machine())
    lines = "\n".join(": ".join(each) for each in facts.items())
    write_answer(facts, lambda: typer.echo(lines), as_json=as_json)


__all__ = ["app"]
