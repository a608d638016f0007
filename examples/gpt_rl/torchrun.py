"""torchrun, with its own options, that leaves it to the ranks to say how a run ended:

    python -m examples.gpt_rl.torchrun --standalone --nproc-per-node 2 -m examples.gpt_rl.train ...

torchrun itself ends with a traceback of its own frames, after Ctrl-C and after each rank that failed.
"""

from __future__ import annotations

import logging
import signal
import sys


def main() -> None:
    """Exit with the status of the first rank that failed, or with 128 and the signal's number."""
    logging.disable(logging.WARNING)  # that it got a signal, and sends it on
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

        run(parse_args(sys.argv[1:]))
    except KeyboardInterrupt:  # before torchrun listens
        sys.exit(128 + signal.SIGINT)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed: it could say nothing
            print(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
