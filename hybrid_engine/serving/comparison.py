"""Check of `generate_config.check_compute` that servers compute what the trainers compute.

    joining         servers report their limits, layers and settings             join
    before a fill   the trainers' forward pass, before any state is offloaded    probe_trainer
    after it        the servers' log-probabilities of the same tokens            require_same
                    then the update is finished, and servers may be resumed

A server is paused while it computes them: requests of clients wait until the comparison has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
import torch

from hybrid_engine.compute_check.gap import NUM_ROWS, ROUNDING
from hybrid_engine.compute_check.logprob_check import Description, TrainerCheck
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits
from hybrid_engine.compute_check.routes import LayerRoutes
from hybrid_engine.errors import MessageError, ServerError, clipped
from hybrid_engine.serving.clients import Server

_DTYPES = {str(dtype): dtype for dtype in ROUNDING}


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Limits, layers and settings of a server, sent as JSON.

    Attributes:
        workers: limits and layers of each worker.
        settings: name in config.json -> value.
    """

    workers: list[Description]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """Encode it; settings of other types, such as dtypes, become text."""
        return msgspec.json.encode(self, enc_hook=str).decode()


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a server to tokens [B, L], sent as JSON.

    Attributes:
        log_probs: [B, L - 1], in nats.
        dtype: dtype in which the server computes.
        routes: [layers, B * L, k] experts of each token in the layers with experts.
    """

    log_probs: list[list[float]]
    dtype: str
    routes: list[list[list[int]]] = []

    def probed(self, tokens: torch.Tensor) -> ProbeAnswer:
        """Convert to a `ProbeAnswer`. Raises ServerError if the shape or the dtype is wrong."""
        rows = tokens.shape[0]
        columns = tokens.shape[1] - 1
        if self.dtype not in _DTYPES or [len(row) for row in self.log_probs] != [columns] * rows:
            raise ServerError(
                f"a server returned {len(self.log_probs)} rows of log-probabilities "
                f"in {clipped(self.dtype)}, expected {rows} rows of {columns}",
                code="unexpected-log-probabilities",
            )
        log_probs = torch.tensor(self.log_probs, dtype=torch.float32)
        routes = [LayerRoutes(torch.tensor(layer)) for layer in self.routes]
        return ProbeAnswer(log_probs, _DTYPES[self.dtype], routes)


def describe(server: object) -> ServerDescription:
    """Request a server's description; a server that is not a `Server` refuses every probe."""
    if isinstance(server, Server):
        return cast(ServerDescription, read_json(ServerDescription, server.describe()))
    refusal = f"{type(server).__name__} is not a serving.clients.Server"
    return ServerDescription(workers=[Description(ProbeLimits(refusal))], settings={})


def read_json(kind: type[Any], text: str) -> Any:
    """Decode a server's JSON response of type `kind`. Raises ServerError for anything else."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise ServerError(
            f"not a {kind.__name__} from a server: {clipped(str(error), 500)}",
            code="unexpected-response",
        ) from None


def token_ids(values: object, limits: ProbeLimits) -> list[list[int]]:
    """Convert to token ids [B, L] for a probe.

    Raises MessageError for ids that are outside `limits`.
    """
    try:
        rows = msgspec.convert(
            values, Annotated[list[list[int]], msgspec.Meta(max_length=NUM_ROWS)]
        )
    except msgspec.ValidationError as error:
        raise MessageError(
            f"invalid token ids for a comparison: {error}", code="invalid-token-ids"
        ) from None
    longest = limits.max_length or 0
    for row in rows:
        if not 2 <= len(row) <= longest or not all(0 <= token < limits.vocab_size for token in row):
            raise MessageError(
                f"{len(row)} token ids to compare: give 2 to {longest} ids, "
                f"each from 0 to {limits.vocab_size - 1}",
                code="invalid-token-ids",
            )
    return rows


class ServerComparison(TrainerCheck):
    """Comparison of servers with the trainers, on one rank of the trainers.

    `join` and `probe_trainer` are collective over the trainers. For the arguments see
    `TrainerCheck`.
    """

    _servers: Sequence[ServerDescription] = ()

    @property
    def is_on(self) -> bool:
        """True if servers that join are compared; the same on all ranks."""
        return self._when != "off"

    def join(self, servers: Sequence[ServerDescription]) -> None:
        """Compare the layers of servers that just joined, and choose tokens to compare.

        `servers`: description of each server, on the first rank; empty on other ranks. Raises
        ComputationError as `agree`.
        """
        self._servers = servers
        self._has_passed = False
        self.agree([worker for server in servers for worker in server.workers])

    def require_same(self, answers: Sequence[ServerAnswer]) -> None:
        """Raise ComputationError if a server's answer differs by more than rounding.

        Called on the first rank only.
        """
        assert self.tokens is not None, "servers were probed"
        pairs = zip(answers, self._servers, strict=True)
        for number, (answer, server) in enumerate(pairs):
            gap = self._gap(answer.probed(self.tokens), f"server {number}")
            self._require_same(gap, server.settings)

    def conclude(self) -> None:
        """Finish a fill; after a comparison, the next is due as `when` says, or if servers join."""
        if self._trained is not None:
            self._trained = None
            self._note_passed()
