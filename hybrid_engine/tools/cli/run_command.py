"""Command `run`: starts the ranks of a program, by torchrun's library and with its options.

    hybrid-engine run --nproc-per-node 2 train.py ARGUMENTS
    hybrid-engine run --nnodes 2 --nproc-per-node 8 --rdzv-id job1 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py ARGUMENTS

It differs from torchrun in what is printed and in defaults:

- One line before the ranks start.
- After a failed rank one line in place of a report and of torchrun's own traceback; the ranks print
  their errors themselves (ranks/uncaught.py).
- After Ctrl-C or SIGTERM ranks have `_SECONDS_TO_END` to save a checkpoint.
- On one node gloo and the store listen on the loopback interface. The store of torchrun listens on
  all interfaces, has no authentication, and unpickles the data it receives.

The exit status is that of the first failed rank, or 128 plus the number of the signal that ended
it or this command; 2 if no rank was started or the nodes have lost each other.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hybrid_engine.errors import Violation
from hybrid_engine.tools.cli.options import refuse

if TYPE_CHECKING:
    from argparse import Namespace

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_BACKEND = "loopback"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SECONDS_TO_END = 600
"""Time of ranks after Ctrl-C or SIGTERM, unless `--shutdown-timeout` sets it."""


def run(context: typer.Context) -> None:
    """Start a program on several ranks: torchrun with its options, for `train` and other programs.

    `hybrid-engine run --help` lists them. Plain torchrun works, too.
    """
    start_ranks(context.args)


def start_ranks(arguments: Sequence[str]) -> None:
    """Start ranks and wait for their end, as the command does."""
    if _LOG_LEVEL not in os.environ:
        # Without it a node prints a trace in C++ if the node with the store ends before it. torch
        # reads the level when it is imported; ranks do not inherit it.
        os.environ[_LOG_LEVEL] = "ERROR"
        import torch  # noqa: F401

        del os.environ[_LOG_LEVEL]
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.disable(logging.ERROR)  # torchrun logs each signal that it forwards, and failures
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_END))
    parser = torchrun.get_args_parser()
    parser.prog = "hybrid-engine run"
    options = parser.parse_args(arguments)
    is_file = not (options.module or options.no_python)
    if is_file and not Path(options.training_script).is_file():
        refuse(
            [
                Violation(
                    "PROGRAM",
                    f"{options.training_script} is not a file",
                    "Name a program, or a module after -m",
                    code="no-program",
                )
            ]
        )
    try:
        _listen_on_loopback(options)
        # Ranks import for seconds before they print.
        num_ranks = torchrun.determine_local_world_size(options.nproc_per_node)
        typer.echo(f"starting {num_ranks} ranks of {options.training_script} ...", err=True)
        torchrun.run(options)
    except SignalException as stop:
        raise typer.Exit(128 + stop.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"ended with exit status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                how += ", often by the system for lack of memory (dmesg)"
            status = 128 - status
        typer.echo(f"rank {rank} {how}", err=True)
        raise typer.Exit(status) from None
    except (RendezvousError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def _listen_on_loopback(options: Namespace) -> None:
    """Replace the rendezvous, if torchrun would choose one of this node itself."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    is_free = options.rdzv_backend == "static" and not options.rdzv_endpoint
    most_nodes = options.nnodes.rpartition(":")[2]
    is_on_one_node = is_free and options.master_port is None and most_nodes == "1"
    if not (options.standalone or is_on_one_node):
        return
    options.standalone = False  # otherwise torchrun replaces the backend
    options.rdzv_backend = _BACKEND
    rendezvous_handler_registry.register(_BACKEND, _loopback_rendezvous)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)


def _loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a rendezvous of this node, with a store that listens on the loopback interface."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from hybrid_engine.ranks.world import store_at

    store = store_at(_LOOPBACK)

    class LoopbackRendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            of_run = dist.PrefixStore(self.run_id, store)
            address = RendezvousStoreInfo(self.master_addr, self.master_port)
            return RendezvousInfo(of_run, self.rank, self.world_size, address)

    return LoopbackRendezvous(
        _LOOPBACK,
        store.port,
        rank=0,
        world_size=1,
        run_id=parameters.run_id,
        timeout=0,
    )
