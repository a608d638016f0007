"""`generate_config.check_compute` with servers: whether they and the trainers compute the same.

    joining         servers say what they can compute and by which settings      agree
    before a fill   the trainers' forward pass, before anything leaves           ask_trainer
    after it        the servers' log-probabilities of the same tokens            require_same
                    then the update is finished, and servers may be resumed

A server computes them while it is paused: requests of others wait until the comparison went well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
import torch

from hybrid_engine.errors import ComputationError, MessageError, ServerError, clipped
from hybrid_engine.ports import Trainer
from hybrid_engine.probes import ProbeAnswer, Probed, ProbeLimits
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.clients import Server
from hybrid_engine.switch.computation import (
    NUM_ROWS,
    TOLERANCES,
    AskingTrainer,
    Gap,
    differing,
    limits_of,
    tokens_within,
)

logger = logging.getLogger("hybrid_engine")

_DTYPES = {str(dtype): dtype for dtype in TOLERANCES}


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a server can compute, and by which settings; as JSON.

    Attributes:
        refusal, max_length, vocab_size: see `ProbeLimits`.
        settings: by their names in config.json.
    """

    refusal: str
    max_length: int
    vocab_size: int
    settings: dict[str, Any]

    @property
    def limits(self) -> ProbeLimits:
        """As a side's."""
        return ProbeLimits(self.refusal, self.max_length, vocab_size=self.vocab_size)


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a server to tokens [B, L]; as JSON.

    Attributes:
        log_probs: [B, L - 1].
        dtype: that the server computes in.
    """

    log_probs: list[list[float]]
    dtype: str

    def probed(self, tokens: torch.Tensor) -> ProbeAnswer:
        """As a side's. Raises ServerError for one of another shape or dtype."""
        rows, columns = tokens.shape[0], tokens.shape[1] - 1
        if self.dtype not in _DTYPES or [len(row) for row in self.log_probs] != [columns] * rows:
            raise ServerError(
                f"a server answers {len(self.log_probs)} rows of log-probabilities in {clipped(self.dtype)}, "
                f"{rows} rows of {columns} were asked for"
            )
        return ProbeAnswer(torch.tensor(self.log_probs, dtype=torch.float32), _DTYPES[self.dtype])


def described(server: object) -> Description:
    """Return a server's description of itself; one of another class than `Server` cannot be asked."""
    if isinstance(server, Server):
        return cast(Description, read_json(Description, server.describe()))
    refusal = f"{type(server).__name__} is not a serving.clients.Server"
    return Description(refusal=refusal, max_length=1, vocab_size=1, settings={})


def read_json(kind: type[Any], text: str) -> Any:
    """Return a server's answer. Raises ServerError for anything but this type."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise ServerError(f"not a {kind.__name__} of a server: {clipped(str(error), 500)}") from None


def token_ids(given: object, limits: ProbeLimits) -> list[list[int]]:
    """Return token ids that a server is asked to compute. Raises MessageError for those that it cannot take."""
    try:
        rows = msgspec.convert(given, Annotated[list[list[int]], msgspec.Meta(max_length=NUM_ROWS)])
    except msgspec.ValidationError as error:
        raise MessageError(f"not token ids to compare: {error}") from None
    longest = limits.max_length or 0
    for row in rows:
        if not 2 <= len(row) <= longest or not all(0 <= token < limits.vocab_size for token in row):
            raise MessageError(
                f"{len(row)} token ids to compare: 2 to {longest} are possible, each from 0 to {limits.vocab_size - 1}"
            )
    return rows


@dataclass(frozen=True)
class _Asked:
    """Token ids [B, L] that all sides compute, and how each server describes itself; those on the first rank alone."""

    tokens: torch.Tensor
    descriptions: Sequence[Description]


class ServerComparison(AskingTrainer):
    """The comparison of one rank of the trainers. `agree` and `ask_trainer` are collective, over the trainers.

    Args:
        trainer: compared, where it is a `Probed`.
        job: of the trainers.
        when: "first": until servers that joined have been compared once; "always"; "off".
    """

    def __init__(self, trainer: Trainer, job: Job, when: Literal["first", "always", "off"]) -> None:
        self._trainer, self._job, self._when = trainer, job, when
        self._asked: _Asked | None = None
        self._trained: ProbeAnswer | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next fill is one to compare in; the same on all ranks."""
        return self._asked is not None

    def has_trainers(self) -> bool:
        """Whether the trainers can be compared, on all ranks; else nothing is due. Collective."""
        self._asked = None
        if self._when == "off":
            return False
        refusals = self._job.agreement.gather(limits_of(self._trainer).refusal, str, "looking at what can be compared")
        if any(refusals):
            self._warn(next(filter(None, refusals)))
        return not any(refusals)

    def agree(self, descriptions: Sequence[Description]) -> None:
        """Choose what servers that have just joined are asked for; `descriptions`: of each, on the first rank.

        A line in the log says why nothing can be compared.
        """
        own = [limits_of(self._trainer), *(description.limits for description in descriptions)]
        gathered = self._job.agreement.gather(own, list[ProbeLimits], "looking at what can be compared")
        refusal, tokens = tokens_within([limits for of_rank in gathered for limits in of_rank])
        self._asked = None if tokens is None else _Asked(tokens, descriptions)
        if tokens is None:
            self._warn(refusal)

    def _warn(self, refusal: str) -> None:
        if self._job.rank == 0:
            logger.warning("[Reshard] the servers' computation is not compared with the trainer's: %s", refusal)

    def ask_trainer(self) -> None:
        """Have the trainer compute; its parameters are on the device."""
        assert self._asked is not None, "it is due"
        assert isinstance(self._trainer, Probed), "else nothing was chosen"
        with self._job.agreement.phase("compute", SHORT_PATIENCE), self._asking(self._job.device):
            self._trained = self._trainer.probe(self._asked.tokens)

    def tokens(self) -> list[list[int]]:
        """Return the token ids that each server is asked for."""
        assert self._asked is not None, "it is due"
        rows: list[list[int]] = self._asked.tokens.tolist()
        return rows

    def require_same(self, answers: Sequence[ServerAnswer]) -> None:
        """Raise ComputationError unless every server's answer is the trainer's but for rounding. On the first rank."""
        assert self._asked is not None, "servers were asked"
        assert self._trained is not None, "servers were asked"
        for number, (answer, description) in enumerate(zip(answers, self._asked.descriptions, strict=True)):
            gap = Gap(self._asked.tokens, self._trained, answer.probed(self._asked.tokens))
            if not gap.is_rounding:
                settings = differing(self._trainer.computed_settings(), description.settings)  # type: ignore[attr-defined]  # a `Probed`
                raise ComputationError(f"server {number} does not compute what the trainer computes: {gap}. {settings}")
            logger.info("[Reshard] server %d computes what the trainer computes: %s", number, gap)

    def conclude(self) -> None:
        """After a fill that went well: nothing is due until other servers join, unless it is always."""
        self._trained = None
        if self._when == "first":
            self._asked = None
