"""Answers of vLLM's route /v1/completions: typed, and checked against the request before any is used.

answer of a server -> checked_choices(answer, Expected(...)) -> list[Choice], in the order of their index
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from hybrid_engine.errors import GenerationError, ServerError, clipped, first_of
from hybrid_engine.serving.invitation import DrawnWith

_ROUNDING = 1e-3
"""Nats by which rounding may lift the log-probability of a certain token above 0."""

_MOST_PROBLEMS = 8


class Weights(msgspec.Struct, frozen=True):
    """Weights that a server says a choice was drawn with.

    Attributes:
        job: of the trainers that filled the server.
        versions: of all its tokens.
    """

    job: str
    versions: list[str]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice's tokens."""

    token_logprobs: list[float]


class Choice(msgspec.Struct, frozen=True):
    """One completion, as the route describes it; the route's other fields are left out."""

    index: int
    token_ids: list[int]
    finish_reason: str
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    hybrid_engine: Weights | None = None

    @property
    def log_probs(self) -> list[float]:
        """Of its tokens; empty where the answer has none."""
        return [] if self.logprobs is None else self.logprobs.token_logprobs

    @property
    def refusal(self) -> str:
        """Why the server refused the request; empty where it did not. vLLM itself aborts without a reason."""
        is_refused = self.finish_reason == "abort" and self.stop_reason is not None
        return clipped(str(self.stop_reason), 500) if is_refused else ""


class _Answer(msgspec.Struct, frozen=True):
    choices: list[Choice]


@dataclass(frozen=True)
class Expected:
    """What a request asked for.

    Attributes:
        num_choices: completions of all prompts of the request.
        max_tokens: most tokens of each.
        vocab_size: token ids are below it.
        has_logprobs: the request asked for them.
        weights: job and version that it asked for; None: any.
    """

    num_choices: int
    max_tokens: int
    vocab_size: int
    has_logprobs: bool
    weights: DrawnWith | None


def checked_choices(answer: object, expected: Expected) -> list[Choice]:
    """Return the choices, ordered by index.

    Raises GenerationError where the server ended a completion early, or computed NaN; ServerError where it refused the
    request, with its reason, and naming everything else that is not as expected.
    """
    try:
        choices = msgspec.convert(answer, _Answer).choices
    except (msgspec.ValidationError, RecursionError) as error:
        raise ServerError(f"the answer is not one of /v1/completions: {clipped(str(error), 500)}") from None
    if refused := sorted({choice.refusal for choice in choices} - {""}):
        raise ServerError(f"the server refused the request: {first_of(refused, 3, '; ')}")
    if ended := sorted({choice.finish_reason for choice in choices} - {"stop", "length"}):
        raise GenerationError(f"completions ended by {first_of(ended, 3)}")
    choices = sorted(choices, key=lambda choice: choice.index)
    problems = [problem for choice in choices for problem in _problems(choice, expected)]
    if [choice.index for choice in choices] != list(range(expected.num_choices)):
        indexes = first_of([str(choice.index) for choice in choices], 10)
        problems.insert(0, f"choices with index {indexes or 'none'}, but {expected.num_choices} were asked for")
    if problems:
        raise ServerError(
            f"the answer is not what was asked for: {first_of(problems, _MOST_PROBLEMS, '; ')}. Check that the server "
            "runs the model of the trainers, and the same release of hybrid-engine"
        )
    for choice in choices:
        for position, value in enumerate(choice.log_probs):
            if not math.isfinite(value):
                raise GenerationError(
                    f"the log-probability of token {position} of choice {choice.index} is {value}: the server computes "
                    "with weights or caches that have such values"
                )
    return choices


def _problems(choice: Choice, expected: Expected) -> Iterator[str]:
    """Describe what of a choice was not asked for."""
    num_tokens, place = len(choice.token_ids), f"choice {choice.index}"
    if not 1 <= num_tokens <= expected.max_tokens:
        yield f"{place} has {num_tokens} tokens, max_tokens is {expected.max_tokens}"
    for token_id in choice.token_ids:
        if not 0 <= token_id < expected.vocab_size:
            yield f"{place}: token id {clipped(str(token_id), 30)} is out of range for vocab_size {expected.vocab_size}"
            break
    if expected.has_logprobs and len(choice.log_probs) != num_tokens:
        yield f"{place} has {len(choice.log_probs)} log-probabilities of {num_tokens} tokens"
    if above := [value for value in choice.log_probs if _ROUNDING < value < math.inf]:
        yield f"{place}: a log-probability is {max(above)}, above 0"
    if expected.weights is not None:
        yield from _other_weights(choice, expected.weights)


def _other_weights(choice: Choice, wanted: DrawnWith) -> Iterator[str]:
    drawn = choice.hybrid_engine
    if drawn is None:
        yield f"choice {choice.index} does not say which weights it was drawn with, {wanted} was asked for"
    elif (drawn.job, drawn.versions) != (wanted.job, [str(wanted.version)]):
        versions = first_of(drawn.versions, 3)
        yield f"choice {choice.index} was drawn with version {versions} of job {drawn.job}, not with {wanted}"
