"""Check of `generate_config.check_compute` that servers compute what the trainers compute.

    joining         servers report their probe limits and settings               agree
    before a fill   the trainers' forward pass, before any state is offloaded    probe_trainer
    after it        the servers' log-probabilities of the same tokens            require_same
                    then the update is finished, and servers may be resumed

A server is paused while it computes them: requests of clients wait until the comparison has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
import torch

from hybrid_engine.compute_check.gap import NUM_ROWS, TOLERANCES, Gap, tokens_within
from hybrid_engine.compute_check.logprob_check import ProbingTrainer, differing, limits_of
from hybrid_engine.compute_check.probes import ProbeAnswer, Probed, ProbeLimits
from hybrid_engine.errors import ComputationError, MessageError, ServerError, clipped
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.clients import Server

logger = logging.getLogger("hybrid_engine")

_DTYPES = {str(dtype): dtype for dtype in TOLERANCES}


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Probe limits and settings of a server, sent as JSON.

    Attributes:
        refusal, max_length, vocab_size: see `ProbeLimits`.
        settings: name in config.json -> value.
    """

    refusal: str
    max_length: int
    vocab_size: int
    settings: dict[str, Any]

    @property
    def limits(self) -> ProbeLimits:
        """Probe limits, in the form that other sides have."""
        return ProbeLimits(self.refusal, self.max_length, vocab_size=self.vocab_size)


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a server to tokens [B, L], sent as JSON.

    Attributes:
        log_probs: [B, L - 1], in nats.
        dtype: dtype in which the server computes.
    """

    log_probs: list[list[float]]
    dtype: str

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
        return ProbeAnswer(torch.tensor(self.log_probs, dtype=torch.float32), _DTYPES[self.dtype])


def described(server: object) -> Description:
    """Request a server's description; a server that is not a `Server` refuses every probe."""
    if isinstance(server, Server):
        return cast(Description, read_json(Description, server.describe()))
    refusal = f"{type(server).__name__} is not a serving.clients.Server"
    return Description(refusal=refusal, max_length=1, vocab_size=1, settings={})


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


@dataclass(frozen=True)
class _ServerProbe:
    """Token ids [B, L] that all sides compute, and the servers' descriptions.

    Descriptions are on the first rank only.
    """

    tokens: torch.Tensor
    descriptions: Sequence[Description]


class ServerComparison(ProbingTrainer):
    """Comparison of servers with the trainers, on one rank of the trainers.

    `has_trainers`, `agree` and `probe_trainer` are collective over the trainers.

    Args:
        trainer: compared if it is a `Probed`.
        job: job of the trainers.
        when: "first": once for servers that have joined; "always": after every fill; "off": never.
    """

    def __init__(
        self, trainer: Trainer, job: Job, when: Literal["first", "always", "exact", "off"]
    ) -> None:
        self._trainer = trainer
        self._job = job
        self._when = when
        self._probe: _ServerProbe | None = None
        self._trained: ProbeAnswer | None = None

    @property
    def is_due(self) -> bool:
        """True if the next fill compares; the same on all ranks."""
        return self._probe is not None

    def has_trainers(self) -> bool:
        """Return True if the trainers can be compared on all ranks; otherwise no fill compares.

        Collective.
        """
        self._probe = None
        if self._when == "off":
            return False
        refusals = self._job.agreement.gather(
            limits_of(self._trainer).refusal, str, "looking at what can be compared"
        )
        if any(refusals):
            self._warn(next(filter(None, refusals)))
        return not any(refusals)

    def agree(self, descriptions: Sequence[Description]) -> None:
        """Choose tokens to compare with servers that just joined, or log why none can be compared.

        `descriptions`: description of each server, on the first rank; empty on other ranks.
        """
        limits_here = [
            limits_of(self._trainer),
            *(description.limits for description in descriptions),
        ]
        gathered = self._job.agreement.gather(
            limits_here, list[ProbeLimits], "looking at what can be compared"
        )
        refusal, tokens = tokens_within([limits for of_rank in gathered for limits in of_rank])
        self._probe = None if tokens is None else _ServerProbe(tokens, descriptions)
        if tokens is None:
            self._warn(refusal)

    def _warn(self, refusal: str) -> None:
        if self._job.rank == 0:
            logger.warning(
                "[Reshard] the servers' computation is not compared with the trainer's: %s", refusal
            )

    def probe_trainer(self) -> None:
        """Run the trainer's forward pass, if `is_due`. Its parameters must be on the device."""
        assert self._probe is not None, "call this only if is_due"
        assert isinstance(self._trainer, Probed), "`agree` chooses tokens only for a `Probed`"
        with self._job.agreement.phase("compute", SHORT_PATIENCE), self._probing(self._job.device):
            self._trained = self._trainer.probe(self._probe.tokens)

    def tokens(self) -> list[list[int]]:
        """Return the token ids [B, L] that every server must compute."""
        assert self._probe is not None, "call this only if is_due"
        rows: list[list[int]] = self._probe.tokens.tolist()
        return rows

    def require_same(self, answers: Sequence[ServerAnswer]) -> None:
        """Raise ComputationError if a server's answer differs by more than rounding.

        Called on the first rank only.
        """
        assert self._probe is not None, "servers were probed"
        assert self._trained is not None, "servers were probed"
        pairs = zip(answers, self._probe.descriptions, strict=True)
        for number, (answer, description) in enumerate(pairs):
            gap = Gap(self._probe.tokens, self._trained, answer.probed(self._probe.tokens))
            if not gap.is_rounding:
                # `agree` chooses tokens only for a `Probed`.
                trained_with = self._trainer.computed_settings()  # type: ignore[attr-defined]
                settings = differing(trained_with, description.settings)
                raise ComputationError(
                    f"server {number} does not compute what the trainer "
                    f"computes: {gap}. {settings}",
                    code="log-probabilities-differ",
                )
            logger.info("[Reshard] server %d computes what the trainer computes: %s", number, gap)

    def conclude(self) -> None:
        """Finish a successful comparison.

        Unless `when` is "always", no fill compares until servers join again.
        """
        self._trained = None
        if self._when == "first":
            self._probe = None
