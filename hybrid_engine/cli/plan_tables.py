"""The answer of `plan` as tables for a terminal. All numbers are those of `--json`, in GiB here."""

from __future__ import annotations

from rich.table import Table

from hybrid_engine.advisor.cluster_plan import GIB, JobPlan
from hybrid_engine.advisor.facts import (
    Answer,
    MinMeanMax,
    RankFacts,
    assumptions,
    bytes_across_hosts,
    device_memory,
    host_memory,
    moved_bytes,
    prefetch_facts,
    prefetched_bytes,
    range_of,
)
from hybrid_engine.advisor.later_switches import LaterSwitches
from hybrid_engine.advisor.memory_peaks import NOT_COUNTED
from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.cli.output import Console, new_table
from hybrid_engine.planning.plan import Link


def print_tables(answer: Answer) -> None:
    """Print the answer to stdout."""
    console, job = Console(), answer.job
    console.print(_bytes_table(job), _peers_table(job), _memory_table(job))
    console.print(_fit_text(job))
    console.print(assumptions(job))
    console.print(NOT_COUNTED)
    rates = ", ".join(f"{link.value} {rate:g}" for link, rate in job.cluster.link_gbps.items())
    console.print(
        f"Estimated time of the transfers: {job.seconds.max():.3f} s (the slowest rank; {job.seconds.mean():.3f} s on "
        f"average) at assumed 10^9 bytes per second and rank: {rates}."
    )
    if answer.prefetch is not None:
        console.print(_prefetch_table(answer.prefetch))
        console.print(_prefetch_text(answer.prefetch))
    if answer.rank is not None:
        console.print(_rank_table(answer.rank))
    if answer.later is not None:
        console.print(_later_table(answer.later))
    cost = answer.planning
    console.print(f"Planned in {cost['seconds']:.2f} s, peak memory {cost['peak_memory'] / GIB:.2f} GiB.")


def _range_row(name: str, numbers: MinMeanMax) -> tuple[str, ...]:
    return name, _gib(numbers["min"]), _gib(numbers["mean"]), _gib(numbers["max"])


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}" if nbytes >= GIB / 1000 or nbytes == 0 else f"{nbytes / GIB:.3g}"


def _bytes_table(job: JobPlan) -> Table:
    hosts = -(-job.world_size // job.cluster.ranks_per_host)
    title = f"A switch on {job.world_size} ranks of {hosts} hosts, GiB by rank"
    table = new_table(title, "", "min", "mean", "max")
    for name, numbers in moved_bytes(job.bytes).items():
        table.add_row(*_range_row(name.replace("_", " "), numbers))
    table.add_section()
    for name, numbers in bytes_across_hosts(job).items():
        table.add_row(*_range_row(f"across hosts, by host: {name}", numbers))
    table.add_section()
    table.add_row(*_range_row("received in sequential order", range_of(job.sequential.received)))
    return table


def _later_table(later: LaterSwitches) -> Table:
    title = f"Later switches, GiB by rank, with incremental: auto and incremental_mb: {later.incremental_mb}"
    table = new_table(title, "", "min", "mean", "max")
    for name, numbers in moved_bytes(later.bytes).items():
        table.add_row(*_range_row(name.replace("_", " "), numbers))
    table.add_row(*_range_row("kept on the device", range_of(later.kept)))
    return table


def _peers_table(job: JobPlan) -> Table:
    title = "The same job elsewhere, by formula: GiB received by each rank"
    table = new_table(title, "system", "formula", "mean", "saved here")
    received = job.bytes.received.mean()
    for peer in job.peers:
        if peer.nbytes is None:
            table.add_row(peer.system, peer.formula, peer.reason, "")
        else:
            saved = f"{1 - received / peer.nbytes:.1%}" if peer.nbytes else ""
            table.add_row(peer.system, peer.formula, _gib(peer.nbytes), saved)
    table.add_row("this plan", "least", _gib(received), "")
    return table


def _memory_table(job: JobPlan) -> Table:
    table = new_table("Memory, GiB by rank (without activations and KV cache)", "", "min", "mean", "max")
    names = {
        "params": "parameters",
        "inelastic": "of these leaving at the end of a switch",
        "grads": f"gradients, {job.trainer.grad_dtype or job.train_dtype}",
        "optimizer": "optimizer state",
        "training": "training, together",
        "inference": "inference weights",
        "switch": "switch, weights awake at once: both together",
        "interleaved_switch": "switch, bucket by bucket: the larger and two",
        "peak": "device peak",
    }
    for name, numbers in device_memory(job).items():
        table.add_row(*_range_row(names[name], numbers))
    table.add_section()
    host = host_memory(job)
    table.add_row(*_range_row("host memory while generating", host["per_rank"]))
    table.add_row(*_range_row("the same, by host", host["per_host"]))
    return table


def _prefetch_table(estimate: PrefetchEstimate) -> Table:
    table = new_table("prefetch: auto, GiB by rank", "", "min", "mean", "max")
    names = {
        "returning": "parameters and optimizer state, which come back",
        "within_peak": "during a rollout, within the peak above",
        "with_room": "during a rollout, with a large prefetch_mb",
        "peak_with_room": "device peak with that",
    }
    for name, numbers in prefetched_bytes(estimate).items():
        table.add_row(*_range_row(names[name], numbers))
    return table


def _prefetch_text(estimate: PrefetchEstimate) -> str:
    off, kept, wide = prefetch_facts(estimate)["seconds_left"].values()
    return (
        f"Estimated copies at a switch to training: {off:.3f} s without prefetch, {kept:.3f} s within the peak, "
        f"{wide:.3f} s with a large prefetch_mb, if the last sequences take as long as is saved; at assumed "
        f"{estimate.rate / 1e9:g} x 10^9 bytes per second and rank, beside a gpu_memory_utilization of "
        f"{estimate.utilization:g}."
    )


def _fit_text(job: JobPlan) -> str:
    cluster, peak = job.cluster, _gib(job.memory.device.max())
    text = f"The peak of {peak} GiB {_verb(job.fits_device)} a device of {cluster.device_gib:g} GiB."
    if cluster.host_gib is not None:
        largest = _gib(job.host_nbytes.max())
        text += f" Offloaded state of {largest} GiB {_verb(bool(job.fits_host))} a host of {cluster.host_gib:g} GiB."
    return text


def _verb(fits: bool) -> str:
    return "fits" if fits else "[bold red]does not fit[/]"


def _rank_table(facts: RankFacts) -> Table:
    table = new_table(f"Rank {facts['rank']}", "", "")
    for name, count in (("transfers", facts["transfers"]), ("buckets", facts["buckets"]), ("peers", facts["peers"])):
        table.add_row(name, str(count))
    for way, by_link in (("received", facts["received"]), ("sent", facts["sent"])):
        for link, nbytes in by_link.items():
            name = "copied on the rank" if link == Link.SELF else f"{way}, {link}"
            table.add_row(f"{name}, GiB", _gib(nbytes))
    table.add_row("messages between hosts, GiB of memory", _gib(facts["staging"]))
    table.add_row("planned in, seconds", f"{facts['planning_seconds']:.2f}")
    return table
