"""Command `verify`: checks the request, runs tools/verify/, prints its verdict."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import ConfigError, Violation, collect
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.models.quantization_configs import block_config, format_in
from hybrid_engine.tools.cli.options import (
    config_argument,
    integer_option,
    read_config,
    refuse,
    refusing,
)
from hybrid_engine.tools.cli.output import Console, new_table, progress, write_answer

if TYPE_CHECKING:
    from hybrid_engine.tools.verify.comparison import Verdict

_RANKS_PER_CORE = 8  # with more, ranks that wait for each other run into their timeouts
_GIB_PER_RANK = 1.0  # libraries of both engines and a small model


def verify(
    words: Annotated[list[str], config_argument()],
    ranks: Annotated[
        int,
        integer_option("Number of ranks: as many processes are started here."),
    ],
    layers: Annotated[
        int | None,
        integer_option(
            "Decoder layers of the small model; default: 4, or as many as the layouts need."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    oversubscribe: Annotated[
        bool,
        typer.Option(help="Start more processes than this machine has room for."),
    ] = False,
) -> None:
    """Switch a small model of the same architecture between two layouts, and compare.

    Both engines are real; random weights; three switches with changing weights. Every vLLM
    parameter must be bitwise equal to that loaded by vLLM itself, and the log-probabilities of the
    trainer (Megatron, or FSDP2 if actor_config.fsdp is set) and of vLLM must match those of
    transformers. Layouts, dtypes and adapters are the configuration's; memory, speed and batch
    settings are small.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.tools.verify.cases import case_of, values_to_verify
    from hybrid_engine.tools.verify.verify import SCRATCH_PREFIX, run_cases

    violations: list[Violation] = []
    if layers is not None and layers < 1:
        problem = f"{layers}, but must be at least 1"
        violations.append(Violation("--layers", problem, "Use 1 or more", code="out-of-range"))
    config = collect(violations, read_config, words, ranks)
    if config is not None and not oversubscribe:
        collect(violations, _check_room_for_ranks, ranks)
    if violations or config is None:
        refuse(violations)
    name = f"{' '.join(words)} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    with refusing(), unwinding_on_sigterm(), scratch_directory(SCRATCH_PREFIX) as scratch:
        actor, generate = values_to_verify(config)
        case = case_of(name, config.model, scratch, ranks, actor, generate, layers)
        case.config(ranks)  # raises with every violation before a process is started
        with progress() as show_step:
            show_step(f"three switches on {ranks} processes")
            (verdict,) = run_cases([case], ranks)
    method = config.generate_config.quantization
    published = block_config(config.hf_config(), method)
    if method is None and published is not None:
        method = f"{format_in(published).method}, by config.json"
    if method not in (None, UNQUANTISED):
        verdict.remarks.append(
            f"Compared without generate_config.quantization ({method}), which rounds weights"
        )
    facts = {**verdict.as_dict(), "faults": verdict.faults}
    write_answer(facts, lambda: _print(verdict), as_json=as_json)
    raise typer.Exit(1 if verdict.faults else 0)


def _check_room_for_ranks(num_ranks: int) -> None:
    """Raise ConfigError if this machine has too few cores or memory for the processes."""
    num_cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    most = max(1, min(_RANKS_PER_CORE * num_cores, int(memory_gib / _GIB_PER_RANK)))
    if num_ranks > most:
        violation = Violation(
            "--ranks",
            f"{num_ranks} processes of {_GIB_PER_RANK:g} GiB or more, on {num_cores} cores and "
            f"{memory_gib:.0f} GiB; there is room for {most}",
            "Use fewer with smaller sizes, or --oversubscribe to start them anyway",
            code="too-many-ranks",
        )
        raise ConfigError([violation])


def _print(verdict: Verdict) -> None:
    Console().print(_verdict_table(verdict))
    for line in (*verdict.remarks, *verdict.faults):
        typer.echo(line)


def _verdict_table(verdict: Verdict) -> Table:
    outcome = "Not the same" if verdict.faults else "The same"
    table = new_table(f"{outcome}: {verdict.name}", "", "")
    table.add_row("vLLM parameters compared, all switches and ranks", str(verdict.num_parameters))
    table.add_row("of them not the bits that vLLM loads itself", str(len(verdict.different)))
    table.add_row("switches with changed weights", str(verdict.num_versions))
    trainer = {"megatron": "Megatron", "fsdp2": "FSDP2"}[verdict.trainer]
    for name, difference in ((trainer, verdict.training), ("vLLM", verdict.vllm)):
        text = "not computed" if difference is None else f"{difference:.1e}"
        label = f"log-probabilities, {name}, {verdict.statistic} difference from transformers"
        table.add_row(label, text)
    nbytes = f"{verdict.bytes_received}, {verdict.bytes_least}"
    table.add_row("bytes received, least possible", nbytes)
    table.add_row("seconds", f"{verdict.seconds:.1f}")
    return table
