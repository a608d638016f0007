"""`verify`: check the request, run the comparison of `hybrid_engine.verification`, print its verdict."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hybrid_engine.cli.options import config_argument, integer_option, read_config, refuse, refusing
from hybrid_engine.cli.output import Console, new_table, progress, write_answer
from hybrid_engine.errors import ConfigError, Violation, collect
from hybrid_engine.layouts.memory import GIB

if TYPE_CHECKING:
    from hybrid_engine.verification.comparison import Verdict

_RANKS_PER_CORE = 8  # with more, ranks that wait for each other run into their timeouts
_GIB_PER_RANK = 1.0  # both engines' libraries and a small model


def verify(
    words: Annotated[list[str], config_argument()],
    ranks: Annotated[int, integer_option("Number of ranks: as many processes are started here.")],
    layers: Annotated[
        int | None, integer_option("Decoder layers of the small model; default: 4, or as many as the layouts need.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    oversubscribe: Annotated[bool, typer.Option(help="Start more processes than this machine has room for.")] = False,
) -> None:
    """Switch a small model of the same architecture between two layouts, with both real engines, and compare.

    Random weights; three switches with changing weights. Every vLLM parameter must be bitwise what vLLM itself loads,
    and the trainer (Megatron, or FSDP2 where actor_config.fsdp is set) and vLLM must compute the log-probabilities that
    transformers computes. Layouts, dtypes and adapters are the configuration's; what concerns memory, speed and the
    batch is small.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.verification.cases import case_of, values_to_verify
    from hybrid_engine.verification.verify import SCRATCH_PREFIX, run_cases

    found: list[Violation] = []
    if layers is not None and layers < 1:
        found.append(Violation("--layers", f"{layers}, but must be at least 1", "Use 1 or more"))
    config = collect(found, read_config, words, ranks)
    if config is not None and not oversubscribe:
        collect(found, _check_room_for_ranks, ranks)
    if found or config is None:
        refuse(found)
    name = f"{' '.join(words)} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    with refusing(), unwinding_on_sigterm(), scratch_directory(SCRATCH_PREFIX) as scratch:
        case = case_of(name, config.model, scratch, ranks, *values_to_verify(config), layers)
        case.config(ranks)  # with every violation, before anything is started
        with progress() as doing:
            doing(f"three switches on {ranks} processes")
            (verdict,) = run_cases([case], ranks)
    if (method := config.generate_config.quantization) is not None:
        verdict.remarks.append(f"Compared without generate_config.quantization ({method}), which rounds weights")
    facts = {**verdict.as_dict(), "faults": verdict.faults}
    write_answer(facts, lambda: _print(verdict), as_json=as_json)
    raise typer.Exit(1 if verdict.faults else 0)


def _check_room_for_ranks(num_ranks: int) -> None:
    """Raise ConfigError for more processes than this machine can be expected to run."""
    num_cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    most = max(1, min(_RANKS_PER_CORE * num_cores, int(memory_gib / _GIB_PER_RANK)))
    if num_ranks > most:
        problem = (
            f"{num_ranks} processes of {_GIB_PER_RANK:g} GiB or more, on {num_cores} cores and {memory_gib:.0f} GiB; "
            f"there is room for {most}"
        )
        raise ConfigError(
            [Violation("--ranks", problem, "Use fewer with smaller sizes, or --oversubscribe to start them anyway")]
        )


def _print(verdict: Verdict) -> None:
    Console().print(_verdict_table(verdict))
    for line in (*verdict.remarks, *verdict.faults):
        typer.echo(line)


def _verdict_table(verdict: Verdict) -> Table:
    table = new_table(f"{'Not the same' if verdict.faults else 'The same'}: {verdict.name}", "", "")
    table.add_row("vLLM parameters compared, all switches and ranks", str(verdict.num_parameters))
    table.add_row("of them not the bits that vLLM loads itself", str(len(verdict.different)))
    table.add_row("switches with changed weights", str(verdict.num_versions))
    trainer = {"megatron": "Megatron", "fsdp2": "FSDP2"}[verdict.trainer]
    for name, difference in ((trainer, verdict.training), ("vLLM", verdict.vllm)):
        text = "not computed" if difference is None else f"{difference:.1e}"
        table.add_row(f"log-probabilities, {name}, {verdict.statistic} difference from transformers", text)
    table.add_row("bytes received, least possible", f"{verdict.bytes_received}, {verdict.bytes_least}")
    table.add_row("seconds", f"{verdict.seconds:.1f}")
    return table
