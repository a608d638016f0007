"""The answer of `plan` as tables for a terminal. All numbers are those of `--json`, in GiB here."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hybrid_engine.advisor.cluster_plan import GIB, JobPlan
from hybrid_engine.cli.output import Console, new_table
from hybrid_engine.planning.plan import Link


def print_tables(job: JobPlan, facts: dict[str, Any]) -> None:
    """Print `facts_of(job)` to stdout."""
    console = Console()
    console.print(_bytes_table(facts), _peers_table(facts), _memory_table(facts))
    memory = facts["memory"]
    console.print(_fit_text(job, memory))
    times = facts["seconds"]
    rates = ", ".join(f"{link} {rate / 1e9:g}" for link, rate in facts["link_bytes_per_second"].items())
    console.print(
        f"Estimated time of the transfers: {times['max']:.3f} s (the slowest rank; {times['mean']:.3f} s on average) "
        f"at assumed 10^9 bytes per second and rank: {rates}."
    )
    if "rank" in facts:
        console.print(_rank_table(facts["rank"]))
    planning = facts["planning"]
    console.print(f"Planned in {planning['seconds']:.2f} s, peak memory {planning['peak_memory'] / GIB:.2f} GiB.")


def _spread_row(name: str, numbers: dict[str, float]) -> tuple[str, ...]:
    return name, *(_gib(numbers[key]) for key in ("min", "mean", "max"))


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes >= GIB / 1000 or nbytes == 0 else f"{nbytes / GIB:.3g}"


def _bytes_table(facts: dict[str, Any]) -> Table:
    world, hosts = facts["world_size"], -(-facts["world_size"] // facts["ranks_per_host"])
    table = new_table(f"A switch on {world} ranks of {hosts} hosts, GiB by rank", "", "min", "mean", "max")
    for name, numbers in facts["bytes"].items():
        table.add_row(*_spread_row(name.replace("_", " "), numbers))
    table.add_section()
    for name, numbers in facts["across_hosts"].items():
        table.add_row(*_spread_row(f"across hosts, by host: {name}", numbers))
    table.add_section()
    table.add_row(*_spread_row("received in sequential order", facts["sequential"]["received"]))
    return table


def _peers_table(facts: dict[str, Any]) -> Table:
    table = new_table("The same job elsewhere, by formula: GiB received by each rank", "system", "formula", "mean")
    for peer in facts["peers"]:
        value = peer["reason"] if peer["nbytes"] is None else _gib(peer["nbytes"])
        table.add_row(peer["system"], peer["formula"], value)
    table.add_row("this plan", "least", _gib(facts["bytes"]["received"]["mean"]))
    return table


def _memory_table(facts: dict[str, Any]) -> Table:
    table = new_table("Memory, GiB by rank (without activations and KV cache)", "", "min", "mean", "max")
    device, host = facts["memory"]["device"], facts["memory"]["host"]
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
    for key, name in names.items():
        table.add_row(*_spread_row(name, device[key]))
    table.add_section()
    table.add_row(*_spread_row("host memory while generating", host["per_rank"]))
    table.add_row(*_spread_row("the same, by host", host["per_host"]))
    return table


def _fit_text(job: JobPlan, memory: dict[str, Any]) -> str:
    verb = "fits" if job.fits_device else "[bold red]does not fit[/]"
    text = f"The peak of {_gib(memory['device']['peak']['max'])} GiB {verb} a device of {job.cluster.device_gib:g} GiB."
    if job.fits_host is not None:
        verb = "fits" if job.fits_host else "[bold red]does not fit[/]"
        largest = _gib(memory["host"]["per_host"]["max"])
        text += f" Offloaded state of {largest} GiB {verb} a host of {job.cluster.host_gib:g} GiB."
    return text


def _rank_table(facts: dict[str, Any]) -> Table:
    table = new_table(f"Rank {facts['rank']}", "", "")
    for name in ("transfers", "buckets", "peers"):
        table.add_row(name, str(facts[name]))
    for way in ("received", "sent"):
        for link, nbytes in facts[way].items():
            name = "copied on the rank" if link == Link.SELF else f"{way}, {link}"
            table.add_row(f"{name}, GiB", _gib(nbytes))
    table.add_row("messages between hosts, GiB of memory", _gib(facts["staging"]))
    table.add_row("planned in, seconds", f"{facts['planning_seconds']:.2f}")
    return table
