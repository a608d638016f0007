"""Responses of vLLM's route /v1/completions, typed and validated against the request before use.

response of a server -> checked_choices(answer, Expected(...)) -> list[Choice], sorted by index
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from hybrid_engine.errors import GenerationError, ServerError, clipped, first_of, shortened
from hybrid_engine.serving.invitation import DrawnWith

_ROUNDING = 1e-3
"""Nats by which rounding may raise the log-probability of a certain token above 0."""

_LARGEST = 3e38
"""Absolute value from which a log-probability is infinite in a batch, which is float32."""

_MAX_PROBLEMS = 8
"""Maximum number of problems in a message."""


class Weights(msgspec.Struct, frozen=True):
    """Weights with which a server generated a choice, as it reports them.

    Attributes:
        job: job of the trainers that filled the server.
        versions: weight versions of the choice's tokens, without repeats, if they are known.
        spans: (version, first token, token after the last) of all tokens, in order, if the request
            asked for any version; None before vLLM 0.32.
    """

    job: str
    versions: list[str] = []
    spans: list[tuple[str, int, int]] | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice's tokens."""

    token_logprobs: list[float]


class Choice(msgspec.Struct, frozen=True):
    """One completion, with the fields of the route that are used here."""

    index: int
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int] | None = None
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    hybrid_engine: Weights | None = None

    @property
    def log_probs(self) -> list[float]:
        """Log-probabilities of the tokens in nats; empty if the response has none."""
        return [] if self.logprobs is None else self.logprobs.token_logprobs

    def versions(self, wanted: DrawnWith) -> tuple[int, ...]:
        """Return the weight version of each token; `wanted`: weights that the request asked for."""
        if wanted.version is not None:
            return (wanted.version,) * len(self.token_ids)
        spans = (self.hybrid_engine and self.hybrid_engine.spans) or []
        return tuple(int(version) for version, start, end in spans for _ in range(start, end))

    @property
    def refusal(self) -> str:
        """Reason for which the server refused the request, or "".

        Aborts by vLLM itself have no reason.
        """
        is_refused = self.finish_reason == "abort" and self.stop_reason is not None
        return clipped(str(self.stop_reason), 500) if is_refused else ""


class _CompletionAnswer(msgspec.Struct, frozen=True):
    choices: list[Choice]


@dataclass(frozen=True)
class Expected:
    """Properties that the response to a request must have.

    Attributes:
        prompt: token ids of the request.
        num_choices: number of completions.
        max_tokens: maximum number of tokens per completion.
        vocab_size: exclusive upper bound of token ids.
        has_logprobs: the request asked for log-probabilities.
        weights: requested job, and version of it.
    """

    prompt: list[int]
    num_choices: int
    max_tokens: int
    vocab_size: int
    has_logprobs: bool
    weights: DrawnWith


def checked_choices(answer: object, expected: Expected) -> list[Choice]:
    """Validate a response and return its choices, sorted by index.

    Raises GenerationError if the server ended a completion early or computed a non-finite
    log-probability; ServerError with the server's reason if it refused the request, or with every
    deviation from `expected`.
    """
    try:
        choices = msgspec.convert(answer, _CompletionAnswer).choices
    except (msgspec.ValidationError, RecursionError) as error:
        raise ServerError(
            f"not a response of /v1/completions: {clipped(str(error), 500)}",
            code="not-a-completion",
        ) from None
    refused = sorted({choice.refusal for choice in choices} - {""})
    if refused:
        raise ServerError(
            f"the server refused the request: {first_of(refused, 3, '; ')}", code="request-refused"
        )
    aborted = sorted({choice.finish_reason for choice in choices} - {"stop", "length"})
    if aborted:
        raise GenerationError(
            f"completions ended by {first_of(aborted, 3)}", code="completion-aborted"
        )
    choices = sorted(choices, key=lambda choice: choice.index)
    problems = [problem for choice in choices for problem in _problems(choice, expected)]
    if [choice.index for choice in choices] != list(range(expected.num_choices)):
        indexes = first_of([str(choice.index) for choice in choices], 10)
        problems.insert(
            0,
            f"choices with index {indexes or 'none'}, "
            f"but the request asked for {expected.num_choices}",
        )
    if problems:
        raise ServerError(
            f"the response does not match the request: {first_of(problems, _MAX_PROBLEMS, '; ')}. "
            "Check that the server runs the model of the trainers, "
            "and the same release of hybrid-engine",
            code="unexpected-completion",
        )
    for choice in choices:
        for position, value in enumerate(choice.log_probs):
            if not abs(value) < _LARGEST:
                raise GenerationError(
                    f"the log-probability of token {position} of choice {choice.index} is {value}: "
                    "the server computes with weights or caches that contain such values",
                    code="not-finite",
                )
    return choices


def _problems(choice: Choice, expected: Expected) -> Iterator[str]:
    """Yield every deviation of a choice from the request."""
    num_tokens = len(choice.token_ids)
    place = f"choice {choice.index}"
    if choice.prompt_token_ids not in (None, expected.prompt):  # not every server returns them
        yield f"{place} completes another prompt than the one of the request"
    if not 1 <= num_tokens <= expected.max_tokens:
        yield f"{place} has {num_tokens} tokens, max_tokens is {expected.max_tokens}"
    for token_id in choice.token_ids:
        if not 0 <= token_id < expected.vocab_size:
            shown = clipped(str(token_id), 30)
            yield f"{place}: token id {shown} is out of range for vocab_size {expected.vocab_size}"
            break
    if expected.has_logprobs and len(choice.log_probs) != num_tokens:
        yield f"{place} has {len(choice.log_probs)} log-probabilities of {num_tokens} tokens"
    # NaN and infinity are reported separately, as a GenerationError.
    above = [value for value in choice.log_probs if _ROUNDING < value < math.inf]
    if above:
        yield f"{place}: a log-probability is {max(above)}, above 0"
    wanted = expected.weights
    if not _has_weights(choice, wanted):
        known = "" if wanted.version is not None else "; each token's is known from vLLM 0.32 on"
        drawn = shortened(choice.hybrid_engine)
        yield f"{place} was drawn with {drawn}, not with {wanted}{known}"


def _has_weights(choice: Choice, wanted: DrawnWith) -> bool:
    """Return whether the requested weights drew a choice."""
    drawn = choice.hybrid_engine
    if drawn is None or drawn.job != wanted.job:
        return False
    if wanted.version is not None:
        return drawn.versions == [str(wanted.version)]
    # Any version of the job will do, but each token must have one.
    spans = drawn.spans or []
    ends = [0, *(end for _, _, end in spans)]
    # [0, 3) and [3, 8) of 8 tokens: ends 0, 3, 8 are the starts 0, 3, and the number of tokens.
    is_whole = ends == [*(start for _, start, _ in spans), len(choice.token_ids)]
    are_numbers = all(version.isdecimal() for version, _, _ in spans)
    return are_numbers and is_whole and ends == sorted(ends)
