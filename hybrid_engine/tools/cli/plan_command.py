"""Command `plan`: checks the request, plans the job with tools/plan/, prints the answer."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybrid_engine.config import HybridConfig, find_violations
from hybrid_engine.errors import ConfigError, Violation, collect, shortened
from hybrid_engine.files.hub import HubSnapshot
from hybrid_engine.layouts.memory import gib
from hybrid_engine.layouts.parallelism import LARGEST_SIZE
from hybrid_engine.models.quantization_configs import block_config, format_in
from hybrid_engine.planning.plan import Link
from hybrid_engine.tools.cli.from_verl import read_verl
from hybrid_engine.tools.cli.options import (
    CONFIG_ARGUMENT,
    integer_option,
    read_config,
    refuse,
    refusing,
)
from hybrid_engine.tools.cli.output import Block, Console, new_table, write_answer
from hybrid_engine.tools.plan.answer import (
    explanations,
    facts_of,
    facts_of_rank,
    later_switches,
    sentences_of,
    tables_of,
)
from hybrid_engine.tools.plan.cluster_plan import (
    DEVICE_GIB,
    LINK_GBPS,
    RESERVE_GIB,
    Cluster,
    JobPlan,
    plan_job,
)

_DEVICES = Path("/dev")
_RATES = ",".join(f"{link}={rate:g}" for link, rate in LINK_GBPS.items())


def plan(
    words: Annotated[list[str], CONFIG_ARGUMENT],
    ranks: Annotated[
        int | None, integer_option("Number of ranks: one for each device. Needed without --from.")
    ] = None,
    hosts_of: Annotated[
        int | None, integer_option("Ranks of one host; default: 8, or what --from reads.")
    ] = None,
    source: Annotated[
        Literal["verl"] | None,
        typer.Option(
            "--from",
            help="Whose configuration CONFIG.yaml is, if not this project's; "
            "its keys can be set too. --ranks is read from it.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=f"Memory by name: {', '.join(DEVICE_GIB)}.")
    ] = None,
    device_gib: Annotated[
        float | None,
        typer.Option(help=f"Memory of one device, GiB; default: {Cluster().device_gib:g}."),
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="Memory of one host, GiB; not checked without.")
    ] = None,
    reserve_gib: Annotated[
        float,
        typer.Option(
            help="Memory of one device, GiB, for what is not counted: CUDA contexts, "
            "communicators, workspaces, captured graphs. A job that fits and leaves less is tight."
        ),
    ] = RESERVE_GIB,
    link_gbps: Annotated[
        str,
        typer.Option(
            help="10^9 bytes per second of one rank, each direction: self, host, network."
        ),
    ] = _RATES,
    elastic: Annotated[
        bool | None,
        typer.Option(
            help="Parameters leave a device page by page, which on GPUs needs cuda-bindings. "
            "Default: yes, since requirements.txt installs it; "
            "on a machine with a GPU, if it is installed there."
        ),
    ] = None,
    rank: Annotated[int | None, integer_option("Also plan every transfer of this rank.")] = None,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="Names of a checkpoint's tensors (* and ?, separated by commas) "
            "that are not trained: also what later switches move with incremental: auto."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also explain the rows of the tables.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for example for a pull request.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print numbers as JSON, in bytes and seconds.")
    ] = False,
) -> None:
    """Say whether a job fits its devices and what a switch between its two layouts moves.

    Needs no device, no weights. The verdict (fits, tight, does not fit) comes first, then the
    numbers. Exits with 3 if the job does not fit.
    """
    violations = []
    numbers = {
        "--hosts-of": hosts_of,
        "--device-gib": device_gib,
        "--host-gib": host_gib,
        # 0 is a valid reserve, as no other size is.
        "--reserve-gib": reserve_gib or None,
    }
    for key, value in numbers.items():
        if value is not None and not 0 < value <= LARGEST_SIZE:
            violations.append(
                Violation(
                    key,
                    f"{value:g} is not a valid size",
                    f"Use a number above 0, at most {LARGEST_SIZE}",
                    code="out-of-range",
                )
            )
    size = collect(violations, _size_of_device, device, device_gib)
    rates = collect(violations, _parse_rates, link_gbps)
    remarks: list[str] = []
    num_mtp_layers = None
    config = None
    if source is not None:
        if verl_job := collect(violations, read_verl, words, ranks, hosts_of):
            config = verl_job.config
            ranks = verl_job.ranks
            hosts_of = verl_job.hosts_of
            remarks += verl_job.remarks
            num_mtp_layers = verl_job.num_mtp_layers
    elif ranks is None:
        violations.append(
            Violation(
                "--ranks",
                "is missing",
                "Give the number of ranks: one for each device",
                code="is-missing",
            )
        )
    else:
        config = collect(violations, read_config, words, ranks)
    if rank is not None and ranks is not None and not 0 <= rank < ranks:
        violations.append(
            Violation(
                "--rank",
                f"{rank} of {ranks} ranks, counted from 0",
                "Name one of them",
                code="out-of-range",
            )
        )
    if as_markdown and as_json:
        violations.append(Violation("--markdown", "and --json", "Leave out one", code="set-twice"))
    if violations or config is None or rates is None or size is None or ranks is None:
        refuse(violations, as_json)
    hosts_of = 8 if hosts_of is None else hosts_of
    is_elastic = _has_elastic_buffers() if elastic is None else elastic
    cluster = Cluster(hosts_of, size, host_gib, rates, is_elastic, reserve_gib)
    started = time.perf_counter()
    with refusing(as_json), Console(stderr=True).status("planning"):
        job = plan_job(config, ranks, cluster, num_mtp_layers)
        facts = facts_of(job)
        if frozen is not None:
            facts["later_switches"] = later_switches(job, frozen.replace(" ", "").split(","))
        seconds = time.perf_counter() - started
        facts["planning"] = {"seconds": seconds, "peak_memory": _peak_memory()}
        if rank is not None:
            facts["rank"] = facts_of_rank(job, rank)
        facts["remarks"] = [*remarks, *_remarks(config, ranks, num_mtp_layers)]
    blocks = [*_blocks(job, facts, explain)]
    if as_markdown:
        snapshot = HubSnapshot.at(config.model)
        model = config.model if snapshot is None else snapshot.repo_id
        name = device or (f"devices of {size:g} GiB" if device_gib else "h200, which is assumed")
        command = shlex.join(["hybrid-engine", *sys.argv[1:]])
        blocks.insert(0, f"**{model}**, {ranks:,} x {name}: `{command}`")
    write_answer(facts, blocks, as_json=as_json, as_markdown=as_markdown)
    raise typer.Exit(0 if facts["verdict"]["fits"] else 3)


def _remarks(config: HybridConfig, ranks: int, num_mtp_layers: int | None) -> Iterator[str]:
    """Yield reasons why a planned job could not train, and limits of the numbers."""
    for violation in find_violations(config, ranks, num_mtp_layers=num_mtp_layers):
        yield f"Training with this project's own loop is refused: {violation}"
    if config.actor_config.lora is not None or config.actor_config.frozen_parameters:
        yield (
            "Memory is counted as if every weight was trained: "
            "adapters and frozen weights take less."
        )
    chosen = block_config(config.hf_config(), config.generate_config.quantization)
    if chosen is not None:
        form = format_in(chosen)
        yield (
            f"vLLM generates in {form.method}, by config.json or generate_config.quantization, and "
            "is sent quantised weights; bytes are counted unquantised, about "
            # Elements of 16 bits in place of 8 (1 per byte) or 4 (2 per byte).
            f"{2 * form.element.per_byte} times as many, and memory without the buffer of "
            "quantised weights."
        )
    method = config.hf_config().get("quantization_config")
    if isinstance(method, dict):
        method = method.get("quant_method", "no method")
    if method is not None:
        yield (
            f"The model's weights are stored quantised ({shortened(method)}): such a checkpoint is "
            "refused, so convert it first."
        )


def _size_of_device(name: str | None, gib: float | None) -> float:
    """Return the memory of a device in GiB. Raises ConfigError for an unknown name, or for both."""
    if name is None:
        return Cluster().device_gib if gib is None else gib
    if gib is not None:
        raise ConfigError.of(
            "--device",
            f"{shortened(name)}, and --device-gib {gib:g}",
            "Leave out one",
            code="set-twice",
        )
    if name.lower() not in DEVICE_GIB:
        raise ConfigError.of(
            "--device",
            f"unknown device {shortened(name)}",
            f"Use one of {', '.join(DEVICE_GIB)}, or --device-gib",
            code="unknown-device",
        )
    return DEVICE_GIB[name.lower()]


def _has_elastic_buffers() -> bool:
    """Return whether cuda-bindings is installed; without GPUs True, as in requirements.txt."""
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return True
    # To look for a submodule imports its parent, which fails if there is none.
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _parse_rates(text: str) -> dict[Link, float]:
    """Return the rate of each link; links that are not named keep their default.

    Raises ConfigError.
    """
    parts = [part.split("=") for part in text.replace(" ", "").split(",")]
    # A part without exactly one "=" cannot be unpacked, which is a ValueError, too.
    with suppress(ValueError):
        rates = {**LINK_GBPS, **{Link(link): float(value) for link, value in parts}}
        if all(0 < rate <= 1e9 for rate in rates.values()):
            return rates
    raise ConfigError.of(
        "--link-gbps",
        shortened(text),
        f"Use rates above 0, at most 1e9, for example {_RATES}",
        code="cannot-be-read",
    )


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    getrusage would include that of the parent process before the fork.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM"].split()[0]) * 1024


def _blocks(job: JobPlan, facts: Mapping[str, Any], explain: bool) -> Iterator[Block]:
    """Yield the answer for a reader: verdict, remarks, tables and explanations."""
    yield sentences_of(job)
    yield from facts["remarks"]
    for title, ranges in tables_of(job, facts).items():
        rows = [(name, *map(gib, values.values())) for name, values in ranges.items()]
        yield new_table(title, ("by rank", "min", "mean", "max"), rows)
    if "rank" in facts:
        rows = []
        for name, value in facts["rank"].items():
            if isinstance(value, dict):
                rows += [(f"{name}.{link}", gib(nbytes)) for link, nbytes in value.items()]
            else:
                rows.append((name, gib(value) if name == "staging" else f"{value:,.10g}"))
        yield new_table("One rank", ("", ""), rows)
    if explain:
        yield explanations(job, facts)
