"""torchrun, with its own options, that leaves it to the ranks to say how a run ended:

    python -m examples.gpt_rl.torchrun --standalone --nproc-per-node 2 -m examples.gpt_rl.train ...

torchrun itself ends with a traceback of its own frames, after Ctrl-C and after each rank that failed.

With --standalone everything listens on the loopback interface: the store of the launcher and its ranks, and gloo in the
ranks. torchrun's own --standalone opens its store on all interfaces, authenticates nobody, and unpickles what it reads
there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", "lo"
_BACKEND = "loopback"


def main() -> None:
    """Exit with the status of the first rank that failed, or with 128 and the signal's number."""
    logging.disable(logging.WARNING)  # that it got a signal, and sends it on
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.run import parse_args, run

        arguments = parse_args(sys.argv[1:])
        if arguments.standalone:
            arguments.standalone = False  # run() would replace the backend
            arguments.rdzv_backend = _BACKEND
            rendezvous_handler_registry.register(_BACKEND, _loopback_rendezvous)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        run(arguments)
    except KeyboardInterrupt:  # before torchrun listens
        sys.exit(128 + signal.SIGINT)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed: it could say nothing
            print(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def _loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a rendezvous of this host alone, by a store that only the loopback interface reaches."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    from hybrid_engine.ranks.world import store_at

    class LoopbackRendezvous(RendezvousHandler):
        use_agent_store = True  # ranks make no store of their own

        def __init__(self) -> None:
            self._store = store_at(_LOOPBACK)
            self._num_rounds = 0

        def get_backend(self) -> str:
            return _BACKEND

        def get_run_id(self) -> str:
            return parameters.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            self._num_rounds += 1  # ranks that are started again find nothing of those before
            store = dist.PrefixStore(f"agent/{self._num_rounds}", self._store)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._store.port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nobody else would come."""

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    return LoopbackRendezvous()


if __name__ == "__main__":
    main()
