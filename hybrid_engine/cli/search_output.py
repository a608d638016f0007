"""`plan --search` on a terminal: a table of pairs that fits 80 columns, and the keys of each to paste."""

from __future__ import annotations

import time
from typing import Any

import typer
from rich import box
from rich.table import Table

from hybrid_engine.advisor.cluster_plan import Cluster
from hybrid_engine.advisor.search import RESERVE, Found, Row, find_pairs, flow
from hybrid_engine.cli.options import refusing
from hybrid_engine.cli.output import Console, progress, write_answer
from hybrid_engine.config import HybridConfig
from hybrid_engine.layouts.memory import GIB, gib

_HEADS = ("", "training", "generation", "state", "act.", "vLLM", "left", "tokens", "recv.", "sec.", "cost")
_LEGEND = (
    "GiB of the device with most: training state; activations, estimated; vLLM's weights; left in the fullest phase. "
    "Tokens: in the KV cache of a replica. Received by a rank in a switch, GiB on average, and seconds of the slowest "
    "at assumed link rates. Cost: doublings (ranks of a replica, halved caches); lower is better. "
    "Nothing was measured on a GPU; docs/planning.md explains each term."
)
_SHORT = {
    **{"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP"},
    **{"expert_tensor": "ETP", "num_shards": "FSDP", "replicas": "copies", "data": "DP"},
}


def search_and_print(config: HybridConfig, ranks: int, cluster: Cluster, remarks: list[str], *, as_json: bool) -> int:
    """Search, print what was found, and return the exit status. Ends the command where nothing keeps the rules."""
    started = time.process_time()
    with refusing(), progress() as doing:
        found = find_pairs(config, ranks, cluster, doing)
    seconds = time.process_time() - started
    facts = {**found.as_dict(), "remarks": remarks, "cpu_seconds": seconds}
    write_answer(facts, lambda: _print(found, cluster, remarks, seconds), as_json=as_json)
    return 0 if found.rows and found.rows[0].fits else 3


def _print(found: Found, cluster: Cluster, remarks: list[str], seconds: float) -> None:
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False)

    if found.fixed:
        say(f"Kept, since the configuration has them: {', '.join(found.fixed)}.")
    if found.rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for number, head in enumerate(_HEADS):
            table.add_column(head, justify="left" if number < 3 else "right", no_wrap=True)
        for number, row in enumerate(found.rows, 1):
            table.add_row(*_cells(number, row))
        console.print(table)
        say(_LEGEND)
        if found.rows[0].job.left < RESERVE:
            say(f"Tight: no pair leaves {gib(RESERVE)} of a device for context, communicators and workspaces.")
        for number, row in enumerate(found.rows, 1):
            # the terminal wraps these lines, so that they can be copied into a file
            typer.echo(f"# {number}")
            typer.echo("\n".join(f"{section}: {flow(keys)}" for section, keys in row.keys.items() if keys))
    elif found.nearest is not None:
        say("Does not fit. The nearest pair:")
        for section, keys in found.nearest.keys.items():
            say(f"  {section}: {flow(keys)}")
        text = " and ".join(f"{gib(nbytes)} {_LACKS[name]}" for name, nbytes in found.nearest.lacks.items())
        say(f"It lacks {text}; a device has {cluster.device_gib:g} GiB.")
        mends = [f"  {text}" for text in found.mends]
        say("\n".join(["With one of these changes a pair fits; each was tried:", *mends] if mends else [_NONE]))
    for remark in remarks:
        say(remark)
    say(f"Searched in {seconds:.1f} s of CPU.")


_LACKS = {
    "training": "for training on a device",
    "vllm": "for vLLM on a device",
    "limits": "for each rank within device_budget_gib or --host-gib",
}
_NONE = "No single change that was tried makes one fit, 16 times as many ranks included: change several keys."


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
    """Return the sizes that differ from their defaults, and DP; two on a line."""
    shown = [f"{short}{sizes[name]}" for name, short in _SHORT.items() if sizes.get(name) is not None]
    return "\n".join(" ".join(shown[first : first + 2]) for first in range(0, len(shown), 2))
