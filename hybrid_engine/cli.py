"""The command line: `python -m hybrid_engine plan …` and `python -m hybrid_engine verify …`.

Exit status 0 when the command did what it was asked and found nothing wrong, 1 when `verify` found a difference, 2 when
the request is impossible; then every reason is printed, and nothing was started; also when the answer could not be
written. 3 when the ranks of `verify` ended without a verdict; their output is printed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybrid_engine.advisor.cluster_plan import GIB, LINK_GBPS, Cluster, JobPlan, plan_job
from hybrid_engine.advisor.facts import facts_of, facts_of_rank
from hybrid_engine.advisor.page import page_of
from hybrid_engine.advisor.sizes_text import LARGEST_SIZE, parse_job, whole_number
from hybrid_engine.errors import (
    ConfigError,
    DependencyError,
    FileError,
    ReshardError,
    Violation,
    clipped,
    shortened,
)
from hybrid_engine.files.durable import write_text
from hybrid_engine.models.directory import read_model
from hybrid_engine.planning.plan import Link
from hybrid_engine.records.layout import DTYPE_NBYTES

if TYPE_CHECKING:
    from hybrid_engine.verification.verify import Verdict

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Train with Megatron and generate with vLLM in turn, on one set of devices."""


class Order(StrEnum):
    """Which rank takes which inference position."""

    AUTO = "auto"
    SEQUENTIAL = "sequential"


_RANKS_PER_CORE = 8  # of `verify`: with more, ranks that wait for each other run into their timeouts
_GIB_PER_RANK = 1.0  # both engines' libraries and a small model


def _whole(text: str) -> int:
    try:
        return whole_number(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _whole_option(meaning: str) -> Any:
    """An option of digits: Python's own numbers also have `_`, and the digits of other scripts."""
    return typer.Option(help=meaning, parser=_whole, metavar="INTEGER")


_RATES = ",".join(f"{link.value}={rate:g}" for link, rate in LINK_GBPS.items())


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Directory with a Hugging Face config.json; weights are not needed.")],
    train: Annotated[
        str,
        typer.Option(
            help="Training sizes: tp,pp,vpp,cp,dp,ep,etp; first,last,embedding,loss,layout for uneven stages; "
            "noop=3:7; vocab. For example tp=8,pp=2,dp=4."
        ),
    ],
    infer: Annotated[str, typer.Option(help="Inference sizes: tp,pp,dp,ep. For example tp=4,dp=16.")],
    order: Annotated[Order, typer.Option(help="auto gives each rank what it already holds most of.")] = Order.AUTO,
    hosts_of: Annotated[int, _whole_option("Ranks of one host.")] = 8,
    device_gib: Annotated[float, typer.Option(help="Memory of one device, GiB.")] = 141.0,
    host_gib: Annotated[float | None, typer.Option(help="Memory of one host, GiB; not checked without.")] = None,
    link_gbps: Annotated[
        str, typer.Option(help="10^9 bytes per second of one rank, each direction: self, host, network.")
    ] = _RATES,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; default: the config's, else bfloat16.")] = None,
    bucket_mb: Annotated[int, _whole_option("Destination MiB per rank that move between two commits.")] = 256,
    rank: Annotated[int | None, _whole_option("Also plan every transfer of this rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON, in bytes and seconds.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows who holds what.")] = None,
) -> None:
    """Say what a switch between two layouts would move, and whether it fits. Needs no device and no weights."""
    found: list[Violation] = list(_option_violations(hosts_of, device_gib, host_gib, bucket_mb, dtype, html))
    rates = _collect(found, _parse_rates, link_gbps)
    table, config = _collect(found, read_model, model, "--model") or (None, {})
    sizes = _collect(found, parse_job, train, infer, table)
    if sizes is not None and rank is not None and not 0 <= rank < sizes[0].world_size:
        found.append(Violation("--rank", f"{rank} of {sizes[0].world_size} ranks, counted from 0", "Name one of them"))
    if found or sizes is None or table is None or rates is None:
        _refuse(found)
    cluster = Cluster(hosts_of, device_gib, host_gib, rates)
    dtype = dtype or _dtype_of(config)
    started = time.perf_counter()
    try:
        job = plan_job(table, *sizes, cluster, order=order.value, dtype=dtype, bucket_nbytes=bucket_mb * 1024**2)
    except DependencyError as error:
        _refuse([Violation("--order", str(error), "Install it or use --order sequential")])
    facts = facts_of(job)
    facts["planning"] = {"seconds": time.perf_counter() - started}
    if rank is not None:
        started = time.perf_counter()
        facts["rank"] = facts_of_rank(job.plan_of(rank))
        facts["rank"]["planning_seconds"] = time.perf_counter() - started
    facts["planning"]["peak_memory"] = _peak_memory()
    with _writing():
        if html is not None:
            write_text(html, page_of(job, f"{model.resolve().name}: {train} to {infer}"))
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            _print(job, facts)


@contextmanager
def _writing() -> Iterator[None]:
    """What cannot be written ends the command with a sentence and status 2."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` does; the command's status stays its own
        _discard_output()
    except (FileError, OSError) as error:
        problem = str(error) if isinstance(error, FileError) else f"writing the answer: {error.strerror or error}"
        _discard_output()
        typer.echo(problem, err=True)
        raise typer.Exit(2) from None


def _discard_output() -> None:
    """What is left in the buffers would fail again when Python ends."""
    with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while the error is handled; rich's own would end the command with status 1."""
        raise


def _peak_memory() -> int:
    """Bytes of this process at their highest. Not getrusage's, which begins with those of whoever started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


@app.command()
def verify(
    model: Annotated[Path, typer.Option(help="Directory with a Hugging Face config.json; weights are not needed.")],
    train: Annotated[str, typer.Option(help="Training sizes, as for plan. For example tp=2,pp=2.")],
    infer: Annotated[str, typer.Option(help="Inference sizes, as for plan. For example tp=2.")],
    layers: Annotated[int, _whole_option("Decoder layers of the small model.")] = 4,
    nproc: Annotated[int | None, _whole_option("Processes; default: as many ranks as the sizes make.")] = None,
    order: Annotated[Order, typer.Option(help="Which rank takes which inference position.")] = Order.AUTO,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    oversubscribe: Annotated[bool, typer.Option(help="Start more processes than this machine has room for.")] = False,
) -> None:
    """Switch a small model of the same architecture between two layouts, with both real engines, and compare.

    Random weights; three switches with changing weights. Every vLLM parameter must be bitwise what vLLM itself loads,
    and Megatron and vLLM must compute the log-probabilities that transformers computes.
    """
    from hybrid_engine.files.scratch import scratch_directory, unwinding_on_sigterm
    from hybrid_engine.verification.verify import SCRATCH_PREFIX, case_of, run_cases

    found: list[Violation] = []
    if layers < 1:
        found.append(Violation("--layers", f"{layers}, but must be at least 1", "Use 1 or more"))
    if nproc is not None and nproc < 1:
        found.append(Violation("--nproc", f"{nproc}, but must be at least 1", "Use 1 or more"))
        nproc = None
    table, _ = _collect(found, read_model, model, "--model") or (None, {})
    sizes = _collect(found, parse_job, train, infer, table, nproc)
    if found or sizes is None:
        _refuse(found)
    world_size = sizes[0].world_size
    if nproc is not None and nproc != world_size:
        problem = f"{nproc} processes, but the sizes make {world_size} ranks"
        _refuse([Violation("--nproc", problem, "Leave it out, or leave dp out")])
    if not oversubscribe:
        _collect(found, _check_room_for_ranks, world_size)
        if found:
            _refuse(found)
    try:
        with unwinding_on_sigterm(), scratch_directory(SCRATCH_PREFIX) as directory:
            case = case_of(f"{train} to {infer}", model, directory, *sizes, layers, order.value, dtype)
            _collect(found, case.config, world_size)
            if found:
                _refuse(found)
            (verdict,) = run_cases([case], world_size)
    except (FileError, ReshardError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileError) else 3) from None
    with _writing():
        if as_json:
            typer.echo(json.dumps({**asdict(verdict), "faults": verdict.faults}, indent=2))
        else:
            _Console().print(_verdict_table(verdict))
            for line in (*verdict.remarks, *verdict.faults):
                typer.echo(line)
    raise typer.Exit(1 if verdict.faults else 0)


def _check_room_for_ranks(num_ranks: int) -> None:
    """Raise ConfigError for more processes than can be expected to end on this machine."""
    num_cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    most = max(1, min(_RANKS_PER_CORE * num_cores, int(memory_gib / _GIB_PER_RANK)))
    if num_ranks > most:
        problem = (
            f"{num_ranks} processes of {_GIB_PER_RANK:g} GiB or more, on {num_cores} cores and {memory_gib:.0f} GiB; "
            f"there is room for {most}"
        )
        raise ConfigError([Violation("--nproc", problem, "Use smaller sizes, or --oversubscribe to start them anyway")])


def _verdict_table(verdict: Verdict) -> Table:
    table = _table(f"{'Not the same' if verdict.faults else 'The same'}: {verdict.name}", "", "")
    table.add_row("vLLM parameters compared, all switches and ranks", str(verdict.num_parameters))
    table.add_row("of them not the bits that vLLM loads itself", str(len(verdict.different)))
    table.add_row("switches with changed weights", str(verdict.num_versions))
    for name, difference in (("Megatron", verdict.megatron), ("vLLM", verdict.vllm)):
        text = "not computed" if difference is None else f"{difference:.1e}"
        table.add_row(f"log-probabilities, {name}, {verdict.statistic} difference from transformers", text)
    table.add_row("bytes received, least possible", f"{verdict.bytes_received}, {verdict.bytes_least}")
    table.add_row("seconds", f"{verdict.seconds:.1f}")
    return table


def _option_violations(
    hosts_of: int, device_gib: float, host_gib: float | None, bucket_mb: int, dtype: str | None, html: Path | None
) -> Iterator[Violation]:
    numbers = {"--hosts-of": hosts_of, "--bucket-mb": bucket_mb, "--device-gib": device_gib, "--host-gib": host_gib}
    for key, value in numbers.items():
        if value is not None and not 0 < value <= LARGEST_SIZE:
            yield Violation(key, f"{value:g} is not a valid size", f"Use a number above 0, at most {LARGEST_SIZE}")
    if dtype is not None and dtype not in DTYPE_NBYTES:
        yield Violation("--dtype", f"{shortened(dtype)} is not known", f"Use one of {', '.join(DTYPE_NBYTES)}")
    if html is not None and (problem := _unwritable(html)):
        yield Violation("--html", problem, "Name a file in a directory that lets this user write")


def _unwritable(path: Path) -> str | None:
    """Why no file can be put at `path`, or None; known before minutes of planning."""
    try:
        if path.exists() and not path.is_file():
            return f"{path} is not a regular file"
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            return None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return f"{clipped(str(path))} cannot be written: {getattr(error, 'strerror', None) or error}"


def _parse_rates(text: str) -> dict[Link, float]:
    """Rates by link; those that are not given stay at their default. Raises ConfigError."""
    rates, found = dict(LINK_GBPS), []
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        try:
            rates[Link(key)] = float(value)
        except ValueError:
            found.append(Violation("--link-gbps", f"{shortened(part)} cannot be read", f"For example {_RATES}"))
    found += [
        Violation("--link-gbps", f"{link.value}={rate:g} is not a valid rate", "Use a number above 0, at most 1e9")
        for link, rate in rates.items()
        if not 0 < rate <= 1e9
    ]
    if found:
        raise ConfigError(found)
    return rates


def _dtype_of(config: dict[str, Any]) -> str:
    """The weights' dtype in a config written by transformers 4 (torch_dtype) or 5 (dtype)."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return dtype if dtype in DTYPE_NBYTES else "bfloat16"


def _collect(found: list[Violation], function: Any, *args: Any) -> Any:
    """The function's result, or None and its findings added to `found`."""
    try:
        return function(*args)
    except ConfigError as error:
        found.extend(error.findings)
        return None


def _refuse(found: list[Violation]) -> None:
    typer.echo(str(ConfigError(found)), err=True)
    raise typer.Exit(2)


# -- tables ------------------------------------------------------------------------------------------------------------


def _print(job: JobPlan, facts: dict[str, Any]) -> None:
    console = _Console()
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


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _bytes_table(facts: dict[str, Any]) -> Table:
    world, hosts = facts["world_size"], -(-facts["world_size"] // facts["ranks_per_host"])
    table = _table(f"A switch on {world} ranks of {hosts} hosts, GiB by rank", "", "min", "mean", "max")
    for name, numbers in facts["bytes"].items():
        table.add_row(*_spread_row(name.replace("_", " "), numbers))
    table.add_section()
    for name, numbers in facts["across_hosts"].items():
        table.add_row(*_spread_row(f"across hosts, by host: {name}", numbers))
    table.add_section()
    table.add_row(*_spread_row("received in sequential order", facts["sequential"]["received"]))
    return table


def _peers_table(facts: dict[str, Any]) -> Table:
    table = _table("The same job elsewhere, by formula: GiB received by each rank", "system", "formula", "mean")
    for peer in facts["peers"]:
        value = peer["reason"] if peer["nbytes"] is None else _gib(peer["nbytes"])
        table.add_row(peer["system"], peer["formula"], value)
    table.add_row("this plan", "least", _gib(facts["bytes"]["received"]["mean"]))
    return table


def _memory_table(facts: dict[str, Any]) -> Table:
    table = _table("Memory, GiB by rank (without activations and KV cache)", "", "min", "mean", "max")
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
    table = _table(f"Rank {facts['rank']}", "", "")
    for name in ("transfers", "buckets", "peers"):
        table.add_row(name, str(facts[name]))
    for way in ("received", "sent"):
        for link, nbytes in facts[way].items():
            name = "copied on the rank" if link == Link.SELF else f"{way}, {link}"
            table.add_row(f"{name}, GiB", _gib(nbytes))
    table.add_row("messages between hosts, GiB of memory", _gib(facts["staging"]))
    table.add_row("planned in, seconds", f"{facts['planning_seconds']:.2f}")
    return table
