"""The answer of `plan` on a terminal: the verdict, then the numbers as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from hybrid_engine.advisor.facts import Answer, RankFacts, assumptions, prefetch_facts
from hybrid_engine.advisor.job_verdict import JobVerdict
from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.advisor.sections import UNITS, Section, Unit, sections_of
from hybrid_engine.cli.output import Console, new_table
from hybrid_engine.layouts.memory_peaks import NOT_COUNTED
from hybrid_engine.layouts.memory_plan import GIB
from hybrid_engine.planning.plan import Link


def print_answer(answer: Answer) -> None:
    """Print the answer to stdout."""
    console, job = Console(highlight=False), answer.job
    _print_verdict(console, JobVerdict(job), answer.remarks)
    for section in sections_of(answer):
        _print_section(console, section)
    console.print(assumptions(job), markup=False)
    console.print(NOT_COUNTED, markup=False)
    rates = ", ".join(f"{link.value} {rate:g}" for link, rate in job.cluster.link_gbps.items())
    console.print(f"Assumed speeds, 10^9 bytes per second of one rank, each direction: {rates}.")
    if answer.prefetch is not None:
        console.print(_prefetch_text(answer.prefetch))
    if answer.rank is not None:
        console.print(_rank_table(answer.rank, Unit.of(job)))
    console.print(UNITS)
    cost = answer.planning
    console.print(f"Planned in {cost['seconds']:.2f} s, peak memory {cost['peak_memory'] / GIB:.2f} GiB.")


def _print_verdict(console: Console, verdict: JobVerdict, remarks: Sequence[str]) -> None:
    styles = {"Fits": "bold green", "Does not fit": "bold red"}
    for heading, sentence in verdict.sentences().items():
        console.print(Text.assemble((f"{heading}: ", styles.get(heading, "bold")), sentence))
    for remark in remarks:
        console.print(remark, markup=False)
    console.print()


def _print_section(console: Console, section: Section) -> None:
    table = new_table(section.title, "", "min", "mean", "max")
    for row in section.rows:
        table.add_row(*row.cells(section.unit))
    console.print(table)
    if section.note:
        console.print(section.note, markup=False)


def _prefetch_text(estimate: PrefetchEstimate) -> str:
    off, kept, wide = prefetch_facts(estimate)["seconds_left"].values()
    return (
        f"Estimated copies at a switch to training: {off:.3f} s without prefetch, {kept:.3f} s within the peak, "
        f"{wide:.3f} s with a large prefetch_mb, if the last sequences take as long as is saved; at assumed "
        f"{estimate.rate / 1e9:g} x 10^9 bytes per second and rank, beside a gpu_memory_utilization of "
        f"{estimate.utilization:g}."
    )


def _rank_table(facts: RankFacts, unit: Unit) -> Table:
    table = new_table(f"Rank {facts['rank']}", "", "")
    for name, count in (("transfers", facts["transfers"]), ("buckets", facts["buckets"]), ("peers", facts["peers"])):
        table.add_row(name, str(count))
    for way, by_link in (("received", facts["received"]), ("sent", facts["sent"])):
        for link, nbytes in by_link.items():
            name = "copied within the rank" if link == Link.SELF else f"{way}, {_LINKS[link]}"
            table.add_row(f"{name}, {unit.name}", unit.number(nbytes))
    table.add_row(f"messages between hosts, {unit.name} of memory", unit.number(facts["staging"]))
    table.add_row("planned in, seconds", f"{facts['planning_seconds']:.2f}")
    return table


_LINKS = {Link.HOST.value: "same host", Link.NETWORK.value: "other hosts"}
