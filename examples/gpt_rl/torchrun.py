"""torchrun with all its options, but without its tracebacks.

    python -m examples.gpt_rl.torchrun --standalone --nproc-per-node 2 -m examples.gpt_rl.train ...

torchrun prints a traceback of its own frames after Ctrl-C and after a failed rank.

With --standalone, gloo and the store listen on the loopback interface. The store of plain torchrun
listens on all interfaces, has no authentication, and unpickles the data it receives.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_BACKEND = "loopback"


def main() -> None:
    """Exit with the status of the first failed rank, or with 128 plus the number of a signal."""
    logging.disable(logging.WARNING)  # torchrun logs each signal that it forwards
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.run import parse_args, run

        arguments = parse_args(sys.argv[1:])
        if arguments.standalone:
            arguments.standalone = False  # otherwise run() replaces the backend
            arguments.rdzv_backend = _BACKEND
            rendezvous_handler_registry.register(_BACKEND, _loopback_rendezvous)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        run(arguments)
    except KeyboardInterrupt:  # before torchrun has installed its handlers
        sys.exit(128 + signal.SIGINT)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a killed rank cannot report
            killed_by = signal.Signals(-failure.exitcode).name
            print(f"rank {rank} was killed by {killed_by}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def _loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a rendezvous of this host, with a store that listens on the loopback interface."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    from hybrid_engine.ranks.world import store_at

    class LoopbackRendezvous(RendezvousHandler):
        use_agent_store = True  # ranks connect to the store of the launcher

        def __init__(self) -> None:
            self._store = store_at(_LOOPBACK)
            self._num_rounds = 0

        def get_backend(self) -> str:
            return _BACKEND

        def get_run_id(self) -> str:
            return parameters.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            self._num_rounds += 1  # separates the keys of restarted ranks from earlier keys
            store = dist.PrefixStore(f"agent/{self._num_rounds}", self._store)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._store.port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Do nothing: there is only one node."""

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    return LoopbackRendezvous()


if __name__ == "__main__":
    main()
