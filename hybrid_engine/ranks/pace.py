"""Hosts keep near each other in work of many steps, where nothing else lets one wait for another.

    step        0 … 7 | 8 … 15 | 16 … 23 | …
    a host goes past 8 (k + 1) when all hosts have come to 8 k

A host that has less to do would otherwise be at the end, or at a message it shares with another host, long before that
one: waits last `timeout_seconds` at most, and a long piece of work may take longer. So no wait for another host, at the
end of the work either, lasts longer than 16 steps of that host. Whoever is held here had to wait later anyhow.

A rank also hears here, at every step, of failures elsewhere, though no message comes to it from there.
"""

from __future__ import annotations

import time

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.ranks.failure_watch import FailureWatch

NUM_STEPS = 8
"""Between two marks: few questions to the job's store, and a host has that many times 2 within the timeout."""
_SECONDS_BETWEEN_LOOKS = 0.1


class Pace:
    """One rank's steps in one phase; the ranks of a host keep in step by other means.

    Args:
        watch: of the agreement to which the phase belongs.
        num_hosts: of the job; nothing is done for a single one.
        is_first: whether this rank stands for its host.
        timeout_seconds: longest wait for another host.
    """

    def __init__(self, watch: FailureWatch, num_hosts: int, *, is_first: bool, timeout_seconds: float) -> None:
        self._watch = watch
        self._num_hosts = num_hosts
        self._is_first = is_first
        self._timeout_seconds = timeout_seconds

    def reach(self, step: int) -> None:
        """Call at each step, from 0. Raises PeerTransportError when another rank failed, TransportError when a host
        does not come."""
        if self._num_hosts == 1:
            return
        self._heed()
        number, remainder = divmod(step, NUM_STEPS)
        if self._is_first and not remainder:
            self._watch.num_at(f"pace/{number}", arriving=True)
            if number:
                self._await_hosts(number - 1)

    def _await_hosts(self, number: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while (num_there := self._watch.num_at(f"pace/{number}")) not in (self._num_hosts, None):
            self._heed()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"only {num_there} of {self._num_hosts} hosts came to step {number * NUM_STEPS} within "
                    f"{self._timeout_seconds:g} s; raise generate_config.timeout_seconds if they are only slow"
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _heed(self) -> None:
        if failures := self._watch.heard():
            raise PeerTransportError("\n".join(map(str, failures)))
