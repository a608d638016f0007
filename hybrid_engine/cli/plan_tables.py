"""The answer of `plan` as tables for a terminal. All numbers are those of `--json`, in GiB here."""

from __future__ import annotations

from rich.table import Table

from hybrid_engine.advisor.cluster_plan import GIB
from hybrid_engine.advisor.facts import Answer, JobFacts, MemoryFacts, MinMeanMax, RankFacts, named
from hybrid_engine.cli.output import Console, new_table
from hybrid_engine.planning.plan import Link


def print_tables(answer: Answer) -> None:
    """Print the answer to stdout."""
    console, facts = Console(), answer.job
    console.print(_bytes_table(facts), _peers_table(facts), _memory_table(facts.memory))
    console.print(_fit_text(facts.memory))
    rates = ", ".join(f"{link} {rate / 1e9:g}" for link, rate in facts.link_bytes_per_second.items())
    console.print(
        f"Estimated time of the transfers: {facts.seconds.max:.3f} s (the slowest rank; {facts.seconds.mean:.3f} s on "
        f"average) at assumed 10^9 bytes per second and rank: {rates}."
    )
    if answer.rank is not None:
        console.print(_rank_table(answer.rank))
    cost = answer.planning
    console.print(f"Planned in {cost.seconds:.2f} s, peak memory {cost.peak_memory / GIB:.2f} GiB.")


def _range_row(name: str, numbers: MinMeanMax) -> tuple[str, ...]:
    return name, _gib(numbers.min), _gib(numbers.mean), _gib(numbers.max)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes >= GIB / 1000 or nbytes == 0 else f"{nbytes / GIB:.3g}"


def _bytes_table(facts: JobFacts) -> Table:
    hosts = -(-facts.world_size // facts.ranks_per_host)
    title = f"A switch on {facts.world_size} ranks of {hosts} hosts, GiB by rank"
    table = new_table(title, "", "min", "mean", "max")
    for name, numbers in named(facts.bytes):
        table.add_row(*_range_row(name.replace("_", " "), numbers))
    table.add_section()
    for name, numbers in named(facts.across_hosts):
        table.add_row(*_range_row(f"across hosts, by host: {name}", numbers))
    table.add_section()
    table.add_row(*_range_row("received in sequential order", facts.sequential.received))
    return table


def _peers_table(facts: JobFacts) -> Table:
    table = new_table("The same job elsewhere, by formula: GiB received by each rank", "system", "formula", "mean")
    for peer in facts.peers:
        table.add_row(peer.system, peer.formula, peer.reason if peer.nbytes is None else _gib(peer.nbytes))
    table.add_row("this plan", "least", _gib(facts.bytes.received.mean))
    return table


def _memory_table(memory: MemoryFacts) -> Table:
    table = new_table("Memory, GiB by rank (without activations and KV cache)", "", "min", "mean", "max")
    names = {
        "params": "parameters",
        "grads": "gradients, float32",
        "optimizer": "optimizer state",
        "training": "training, together",
        "inference": "inference weights",
        "switch": "switch, sleep mode: parameters + inference weights",
        "interleaved_switch": "switch, bucket by bucket: the larger and two",
        "peak": "device peak",
    }
    for name, numbers in named(memory.device):
        table.add_row(*_range_row(names[name], numbers))
    table.add_section()
    table.add_row(*_range_row("host memory while generating", memory.host.per_rank))
    table.add_row(*_range_row("the same, by host", memory.host.per_host))
    return table


def _fit_text(memory: MemoryFacts) -> str:
    device, host = memory.device, memory.host
    text = f"The peak of {_gib(device.peak.max)} GiB {_verb(device.fits)} a device of {device.size / GIB:g} GiB."
    if host.size is not None:
        largest = _gib(host.per_host.max)
        text += f" Offloaded state of {largest} GiB {_verb(bool(host.fits))} a host of {host.size / GIB:g} GiB."
    return text


def _verb(fits: bool) -> str:
    return "fits" if fits else "[bold red]does not fit[/]"


def _rank_table(facts: RankFacts) -> Table:
    table = new_table(f"Rank {facts.rank}", "", "")
    for name, count in (("transfers", facts.transfers), ("buckets", facts.buckets), ("peers", facts.peers)):
        table.add_row(name, str(count))
    for way, by_link in (("received", facts.received), ("sent", facts.sent)):
        for link, nbytes in by_link.items():
            name = "copied on the rank" if link == Link.SELF else f"{way}, {link}"
            table.add_row(f"{name}, GiB", _gib(nbytes))
    table.add_row("messages between hosts, GiB of memory", _gib(facts.staging))
    table.add_row("planned in, seconds", f"{facts.planning_seconds:.2f}")
    return table
