"""`plan`: check the request, let `hybrid_engine.advisor` plan the job, print or write its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hybrid_engine.advisor.cluster_plan import DEVICE_GIB, GIB, LINK_GBPS, Cluster, JobPlan, plan_job
from hybrid_engine.advisor.facts import Answer, PlanningCost, facts_of_rank
from hybrid_engine.advisor.job_verdict import JobVerdict
from hybrid_engine.advisor.later_switches import later_switches
from hybrid_engine.advisor.page import page_of
from hybrid_engine.advisor.prefetch_estimate import PrefetchEstimate
from hybrid_engine.advisor.sizes_text import is_sharded, parse_job
from hybrid_engine.advisor.trainers import Fsdp, Megatron, PlannedTrainer
from hybrid_engine.cli.options import (
    Order,
    collect,
    integer_option,
    model_directory,
    model_option,
    name_of_model,
    refuse,
)
from hybrid_engine.cli.output import progress, unwritable, writing
from hybrid_engine.cli.plan_tables import print_answer
from hybrid_engine.errors import ConfigError, DependencyError, Violation, shortened
from hybrid_engine.files.durable import write_text
from hybrid_engine.layouts.parallelism import LARGEST_SIZE, ShardedParallelism, TrainParallelism
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Link
from hybrid_engine.records.layout import DTYPE_NBYTES

_DEVICES = Path("/dev")
_RATES = ",".join(f"{link.value}={rate:g}" for link, rate in LINK_GBPS.items())


def plan(
    model: Annotated[str, model_option()],
    train: Annotated[
        str,
        typer.Option(
            help="Training sizes: tp,pp,vpp,cp,dp,ep,etp; first,last,embedding,loss,layout for uneven stages; "
            "noop=3:7; vocab. For example tp=8,pp=2,dp=4. etp is tp unless given; dp is what the other side makes, or "
            "1. Or FSDP2's: fsdp,replicas. For example fsdp=8,replicas=2."
        ),
    ],
    infer: Annotated[str, typer.Option(help="Inference sizes: tp,pp,dp,ep. For example tp=4,dp=16.")],
    order: Annotated[Order, typer.Option(help="auto gives each rank what it already holds most of.")] = Order.AUTO,
    hosts_of: Annotated[int, integer_option("Ranks of one host.")] = 8,
    device: Annotated[str | None, typer.Option(help=f"Memory by name: {', '.join(DEVICE_GIB)}.")] = None,
    device_gib: Annotated[
        float | None, typer.Option(help=f"Memory of one device, GiB; default: {Cluster().device_gib:g}.")
    ] = None,
    host_gib: Annotated[float | None, typer.Option(help="Memory of one host, GiB; not checked without.")] = None,
    link_gbps: Annotated[
        str, typer.Option(help="10^9 bytes per second of one rank, each direction: self, host, network.")
    ] = _RATES,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; default: the config's, else bfloat16.")] = None,
    train_dtype: Annotated[
        str | None, typer.Option(help="Of the weights in training; default: float32 with fsdp, else as --dtype.")
    ] = None,
    bucket_mb: Annotated[int, integer_option("Destination MiB per rank that move between two commits.")] = 256,
    release_weights: Annotated[
        bool, typer.Option(help="Inference weights leave the device while it trains, as the key of this name says.")
    ] = True,
    elastic: Annotated[
        bool | None,
        typer.Option(
            help="Parameters leave a device page by page, which on GPUs needs cuda-bindings. Default: yes, since "
            "requirements.txt installs it; on a machine with a GPU, if it is installed there."
        ),
    ] = None,
    prefetch_gbps: Annotated[
        float | None,
        typer.Option(help="Also estimate prefetch: 10^9 bytes per second from host to device, of one rank."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="vLLM's share of a device, for weights and KV cache, as the key of this name.")
    ] = Cluster().gpu_memory_utilization,
    max_model_len: Annotated[
        int | None, integer_option("Tokens of the longest sequence; default: the config's.")
    ] = None,
    rank: Annotated[int | None, integer_option("Also plan every transfer of this rank.")] = None,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="Names of a checkpoint's tensors (* and ?, separated by commas) that are not trained: also what later "
            "switches move with incremental: auto."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON, in bytes and seconds.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows who holds what.")] = None,
) -> None:
    """Say whether a job fits its devices and what a switch between its two layouts moves. Needs no device, no weights.

    The verdict comes first, then the numbers. Exits with 3 if the job does not fit.
    """
    found: list[Violation] = list(_option_violations(hosts_of, device_gib, host_gib, bucket_mb, max_model_len, html))
    found += _prefetch_violations(prefetch_gbps, gpu_memory_utilization)
    for key, text in (("--train", train), ("--infer", infer)):
        if not text.strip(" ,"):
            found.append(Violation(key, "names no size", "For one rank pass tp=1"))
    size = collect(found, _size_of_device, device, device_gib)
    rates = collect(found, _parse_rates, link_gbps)
    directory = collect(found, model_directory, model)
    table, config = (directory and collect(found, read_model, directory, "--model")) or (None, {})
    sizes = collect(found, parse_job, train, infer, table)
    if sizes is not None and rank is not None and not 0 <= rank < sizes[0].world_size:
        found.append(Violation("--rank", f"{rank} of {sizes[0].world_size} ranks, counted from 0", "Name one of them"))
    dtypes = collect(found, _dtypes, dtype, train_dtype, config, is_sharded=is_sharded(train))
    if found or not (directory and table and sizes and rates and dtypes and size):
        refuse(found)
    training, inference = sizes
    trainer = collect(found, _trainer, training, directory, table)
    if trainer is None:
        refuse(found)
    has_elastic_buffers = _has_elastic_buffers() if elastic is None else elastic
    cluster = Cluster(hosts_of, size, host_gib, rates, has_elastic_buffers, gpu_memory_utilization)
    make = partial(
        plan_job,
        *(table, trainer, inference, cluster),
        order=order.value,
        dtype=dtypes.infer,
        train_dtype=dtypes.train,
        bucket_nbytes=bucket_mb * 1024**2,
        release_weights=release_weights,
        max_model_len=_longest(config) if max_model_len is None else max_model_len,
    )
    page = None
    with progress() as doing:
        answer = _answer(make, _Beside(rank, frozen, prefetch_gbps), doing)
        if html is not None:
            doing("drawing the page")
            page = page_of(answer, f"{name_of_model(model)}: training {train}, generation {infer}")
    with writing():
        if html is not None and page is not None:
            write_text(html, page)
        if as_json:
            typer.echo(json.dumps(answer.as_dict(), indent=2))
        else:
            print_answer(answer)
    raise typer.Exit(0 if JobVerdict(answer.job).fits else 3)


class _Beside(NamedTuple):
    """What is asked for beside the plan, as the options say it."""

    rank: int | None
    frozen: str | None
    prefetch_gbps: float | None


def _answer(make: Callable[..., JobPlan], beside: _Beside, doing: Callable[[str], None]) -> Answer:
    """Plan the job, and what is asked for beside it. Ends the command where that cannot be."""
    started = time.perf_counter()
    try:
        job = make(progress=doing)
    except DependencyError as error:
        refuse([Violation("--order", str(error), "Install it or use --order sequential")])
    found: list[Violation] = []
    later = None
    if beside.frozen is not None:
        later = collect(found, later_switches, job, beside.frozen.replace(" ", "").split(","))
    if found:
        refuse(found)
    cost = PlanningCost(seconds=time.perf_counter() - started, peak_memory=_peak_memory())
    of_rank = ahead = None
    if beside.rank is not None:
        doing(f"every transfer of rank {beside.rank}")
        started = time.perf_counter()
        own_plan = job.plan_of(beside.rank)
        of_rank = facts_of_rank(own_plan, beside.rank, time.perf_counter() - started)
    if beside.prefetch_gbps is not None:
        share = job.cluster.gpu_memory_utilization
        ahead = PrefetchEstimate(job.memory, job.cluster.device_gib * GIB, share, beside.prefetch_gbps * 1e9)
    return Answer(job, cost, of_rank, ahead, later)


def _size_of_device(name: str | None, gib: float | None) -> float:
    """Return the memory of a device in GiB. Raises ConfigError for an unknown name, and for both."""
    if name is None:
        return Cluster().device_gib if gib is None else gib
    if gib is not None:
        raise ConfigError([Violation("--device", f"{shortened(name)}, and --device-gib {gib:g}", "Leave out one")])
    if name.lower() not in DEVICE_GIB:
        known = f"Use one of {', '.join(DEVICE_GIB)}, or --device-gib"
        raise ConfigError([Violation("--device", f"unknown device {shortened(name)}", known)])
    return DEVICE_GIB[name.lower()]


def _has_elastic_buffers() -> bool:
    """Of the job's GPUs, if this is its machine; elsewhere what requirements.txt installs is taken to be there."""
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return True
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _trainer(sizes: TrainParallelism | ShardedParallelism, directory: Path, table: ModelTable) -> PlannedTrainer:
    """Return who trains. Raises ConfigError where that is FSDP2 and transformers does not know the model."""
    if isinstance(sizes, TrainParallelism):
        return Megatron(sizes)
    try:
        from hybrid_engine.backends.fsdp.unbuilt_model import packed_model_of
    except ImportError as error:
        problem = f"how FSDP2 splits a model is asked of transformers and torch: {error}"
        raise ConfigError([Violation("--train fsdp", problem, "Install both")]) from error
    return Fsdp(sizes, packed_model_of(directory, table, "--model"))


class _Dtypes(NamedTuple):
    """Of the weights on both sides."""

    train: str
    infer: str


def _dtypes(infer: str | None, train: str | None, config: Mapping[str, Any], *, is_sharded: bool) -> _Dtypes:
    """Return those that are given, and for the others the defaults. Raises ConfigError."""
    found = [
        Violation(key, f"unknown dtype {shortened(dtype)}", f"Use one of {', '.join(DTYPE_NBYTES)}")
        for key, dtype in (("--dtype", infer), ("--train-dtype", train))
        if dtype is not None and dtype not in DTYPE_NBYTES
    ]
    if found:
        raise ConfigError(found)
    infer = infer or _dtype_of(config)
    # torch's optimizers step on the parameters themselves, Megatron's keep a float32 copy
    train = train or ("float32" if is_sharded and DTYPE_NBYTES[infer] < DTYPE_NBYTES["float32"] else infer)
    if train != infer and DTYPE_NBYTES[train] <= DTYPE_NBYTES[infer]:
        problem = f"{train}, but inference has {infer}: weights are cast to fewer bits or not at all"
        raise ConfigError([Violation("--train-dtype", problem, "Use a wider dtype, or the same")])
    return _Dtypes(train, infer)


def _option_violations(
    hosts_of: int,
    device_gib: float | None,
    host_gib: float | None,
    bucket_mb: int,
    max_model_len: int | None,
    html: Path | None,
) -> Iterator[Violation]:
    numbers = {"--hosts-of": hosts_of, "--bucket-mb": bucket_mb, "--device-gib": device_gib, "--host-gib": host_gib}
    numbers["--max-model-len"] = max_model_len
    for key, value in numbers.items():
        if value is not None and not 0 < value <= LARGEST_SIZE:
            yield Violation(key, f"{value:g} is not a valid size", f"Use a number above 0, at most {LARGEST_SIZE}")
    if html is not None and (problem := unwritable(html)):
        yield Violation("--html", problem, "Name a file in a directory that lets this user write")


def _prefetch_violations(gbps: float | None, utilization: float) -> Iterator[Violation]:
    if gbps is not None and not 0 < gbps <= 1e9:
        yield Violation("--prefetch-gbps", f"{gbps:g} is not a valid rate", "Use a number above 0, at most 1e9")
    if not 0 < utilization <= 1:
        yield Violation("--gpu-memory-utilization", f"{utilization:g} is no share", "Use a number above 0, at most 1")


def _parse_rates(text: str) -> dict[Link, float]:
    """Return the rate of each link; those that are not given keep their default. Raises ConfigError."""
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


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Return the weights' dtype in a config written by transformers 4 (torch_dtype) or 5 (dtype)."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return dtype if dtype in DTYPE_NBYTES else "bfloat16"


def _longest(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence by a model's config, as vLLM takes it; 0: it does not say."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) else 0


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes. getrusage's would include that of its parent before the fork."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
