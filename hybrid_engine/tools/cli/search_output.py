"""Output of `plan --search`: a table of pairs in 80 columns, and the keys of each pair to paste."""

from __future__ import annotations

import time
from typing import Any

import typer
from rich import box
from rich.table import Table

from hybrid_engine.config import HybridConfig
from hybrid_engine.layouts.memory import GIB, gib
from hybrid_engine.tools.cli.options import refusing
from hybrid_engine.tools.cli.output import Console, progress, write_answer
from hybrid_engine.tools.plan.cluster_plan import Cluster
from hybrid_engine.tools.plan.search import RESERVE, Row, SearchResult, find_pairs, flow

_HEADS = (
    "",
    "training",
    "generation",
    "state",
    "act.",
    "vLLM",
    "left",
    "tokens",
    "recv.",
    "sec.",
    "cost",
)
_LEGEND = (
    "GiB of the device with most: training state; activations, estimated; "
    "vLLM's weights; left in the fullest phase. Tokens: in the KV cache of a replica. "
    "Received by a rank in a switch, GiB on average, and seconds "
    "of the slowest at assumed link rates. Cost: doublings (ranks of a replica, halved caches); "
    "lower is better. Nothing was measured on a GPU; docs/planning.md explains each term."
)
_SHORT = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "num_shards": "FSDP",
    "replicas": "copies",
    "data": "DP",
}
"""Name of a size -> its abbreviation, in the order of the output."""


def search_and_print(
    config: HybridConfig,
    ranks: int,
    cluster: Cluster,
    remarks: list[str],
    *,
    as_json: bool,
) -> int:
    """Search, print the result and return the exit status.

    Ends the command if no sizes satisfy the rules.
    """
    started = time.process_time()
    with refusing(), progress() as show_step:
        result = find_pairs(config, ranks, cluster, show_step)
    seconds = time.process_time() - started
    facts = {**result.as_dict(), "remarks": remarks, "cpu_seconds": seconds}
    write_answer(facts, lambda: _print(result, cluster, remarks, seconds), as_json=as_json)
    return 0 if result.rows and result.rows[0].fits else 3


def _print(result: SearchResult, cluster: Cluster, remarks: list[str], seconds: float) -> None:
    console = Console(highlight=False)

    def print_text(text: str) -> None:
        console.print(text, markup=False)

    if result.fixed:
        print_text(f"Kept, since the configuration has them: {', '.join(result.fixed)}.")
    if result.rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for number, head in enumerate(_HEADS):
            table.add_column(head, justify="left" if number < 3 else "right", no_wrap=True)
        for number, row in enumerate(result.rows, 1):
            table.add_row(*_cells(number, row))
        console.print(table)
        print_text(_LEGEND)
        if result.rows[0].job.left < RESERVE:
            print_text(
                f"Tight: no pair leaves {gib(RESERVE)} of a device for context, "
                "communicators and workspaces."
            )
        for number, row in enumerate(result.rows, 1):
            # Not through rich, which would break lines: these are to be copied into a file.
            typer.echo(f"# {number}")
            lines = [f"{section}: {flow(keys)}" for section, keys in row.keys.items() if keys]
            typer.echo("\n".join(lines))
    elif result.nearest is not None:
        print_text("Does not fit. The nearest pair:")
        for section, keys in result.nearest.keys.items():
            print_text(f"  {section}: {flow(keys)}")
        lacks = [f"{gib(nbytes)} {_LACKS[name]}" for name, nbytes in result.nearest.lacks.items()]
        print_text(f"It lacks {' and '.join(lacks)}; a device has {cluster.device_gib:g} GiB.")
        if result.mends:
            print_text("With one of these changes a pair fits; each was tried:")
            for text in result.mends:
                print_text(f"  {text}")
        else:
            print_text(_NO_MENDS)
    for remark in remarks:
        print_text(remark)
    print_text(f"Searched in {seconds:.1f} s of CPU.")


_LACKS = {
    "training": "for training on a device",
    "vllm": "for vLLM on a device",
    "limits": "for each rank within device_budget_gib or --host-gib",
}
_NO_MENDS = (
    "No single change that was tried makes one fit, "
    "16 times as many ranks included: change several keys."
)


def _cells(number: int, row: Row) -> list[str]:
    facts = row.as_dict()
    tokens = facts["cache_tokens"]
    return [
        str(number),
        _sizes(facts["train"]),
        _sizes(facts["infer"]),
        *(f"{facts[name] / GIB:.1f}" for name in ("training", "activations", "inference", "left")),
        f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens // 1000}k",
        f"{facts['received'] / GIB:.1f}",
        f"{facts['seconds']:.2f}",
        f"{facts['cost']['all']:.1f}",
    ]


def _sizes(sizes: dict[str, Any]) -> str:
    """Return the sizes that differ from their defaults, and DP, two per line."""
    shown = [
        f"{short}{sizes[name]}" for name, short in _SHORT.items() if sizes.get(name) is not None
    ]
    lines = [" ".join(shown[first : first + 2]) for first in range(0, len(shown), 2)]
    return "\n".join(lines)
