"""Command line: `hybrid-engine run`, `plan`, `verify`, ...; or `python -m hybrid_engine`.

    run_command.py        `run`: starts ranks, by torchrun's library
    train_command.py      `train`: a run from one file, which rl/run_settings.py reads
    plan_command.py       `plan`: options and their checks; tools/plan/ does the work
    from_verl.py          `plan --from verl`: conversion of a verl configuration
    verify_command.py     `verify`, `certify`: options and their checks; tools/verify/ does the work
    options.py            parts that the commands' options have in common
    output.py             output of an answer as lines and tables, Markdown or JSON

Exit status:
    0   the command succeeded and found no fault
    1   `verify` or `certify` found a difference
    2   the request is invalid, and every reason was printed before anything started; or the answer
        could not be written
    3   `plan`: the job does not fit its devices or hosts. `verify`, `certify`: the ranks or engines
        ended without a verdict; their output is printed

Without an answer `--json` has the error, with violations or a code if there are any, but not for
unknown options.

That of `run` is in run_command.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

import hybrid_engine
from hybrid_engine.tools.cli.output import write_answer
from hybrid_engine.tools.cli.plan_command import plan
from hybrid_engine.tools.cli.run_command import run
from hybrid_engine.tools.cli.train_command import train
from hybrid_engine.tools.cli.verify_command import certify, verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables truncate option names in narrow terminals
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"hybrid-engine {hybrid_engine.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Train with Megatron or FSDP2 and generate with vLLM in turn, on one set of devices."""


# Each word goes to torchrun's parser.
app.command(
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
)(run)
app.command()(train)
app.command()(plan)
app.command()(verify)
app.command()(certify)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Print facts on which the GPU paths depend, for bug reports: GPUs, driver, packages, limits.

    In a checkout `make gpu-check` tries these paths; see docs/gpu.md.
    """
    from hybrid_engine.tools.verify.machine import facts_of, this_machine

    facts = facts_of(this_machine())
    lines = "\n".join(f"{name}: {fact}" for name, fact in facts.items())
    write_answer(facts, [lines], as_json=as_json)


__all__ = ["app"]
