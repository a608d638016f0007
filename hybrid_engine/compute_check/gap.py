"""Tokens that both sides compute, and the difference between their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hybrid_engine.compute_check.attention import LENGTH
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits
from hybrid_engine.compute_check.routes import MAX_MISROUTED, misrouted

NUM_ROWS = 2
"""Sequences per probe."""

LONGEST = 256
"""Maximum tokens per sequence."""

SHORTEST = 4
"""Minimum tokens per sequence; shorter probes are not compared."""


@dataclass(frozen=True)
class Rounding:
    """Differences of log-probabilities that rounding explains.

    Attributes:
        share: largest difference, as a share of the spread of the trainer's log-probabilities: of
            their standard deviation. Two unrelated functions differ by about one; see
            docs/failures.md.
        quantile: part of the tokens of a block that must not differ by more.
        least_spread: minimum spread in nats. An untrained model gives all tokens nearly the same
            log-probability, and its rounding errors are as large as those of a trained model.
    """

    share: float
    quantile: float
    least_spread: float


ROUNDING: Mapping[torch.dtype, Rounding] = {
    # Rounding moves no token, except one that it routes to another expert of nearly equal score. So
    # an effect on a tenth of the tokens, as of another router, is a different function.
    torch.float32: Rounding(0.001, quantile=0.999, least_spread=1.0),
    # Rounding routes some tokens to other experts, which moves them by about one nat.
    torch.float16: Rounding(0.03, quantile=0.5, least_spread=0.2),
    torch.bfloat16: Rounding(0.1, quantile=0.5, least_spread=0.2),
}
"""Dtype of the coarser side -> differences that its rounding explains."""


@dataclass(frozen=True)
class Gap:
    """Difference between the answers of the trainer and of the side `name` to `tokens` [B, L]."""

    tokens: torch.Tensor
    trained: ProbeAnswer
    served: ProbeAnswer
    name: str = "vLLM"

    @property
    def _differences(self) -> torch.Tensor:
        """Absolute differences [B, L - 1] of the log-probabilities, in nats."""
        return (self.trained.log_probs.double() - self.served.log_probs.double()).abs()

    @property
    def size(self) -> float:
        """Difference in nats at the quantile of `rounding`, of the block in which it is largest.

        Blocks of `LENGTH` positions, because an effect of long sequences moves only the later
        positions. A quantile, because rounding moves single tokens, and a different function many.
        NaN if a difference is.
        """
        num_blocks = -(-self.tokens.shape[1] // LENGTH)
        sizes = []
        for block in self._differences.chunk(num_blocks, dim=1):
            if block.isnan().any():
                return math.nan
            # Of 126 differences (2 rows of 63) number 124 with 0.999, the
            # second largest, and 62 with 0.5.
            index = int((block.numel() - 1) * self.rounding.quantile)
            sizes.append(block.flatten().sort().values[index])
        return torch.stack(sizes).max().item()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the coarser side."""
        dtypes = (self.trained.dtype, self.served.dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def rounding(self) -> Rounding:
        """Differences that rounding explains."""
        return ROUNDING.get(self.dtype, ROUNDING[torch.bfloat16])

    @property
    def tolerance(self) -> float:
        """Largest `size` in nats that rounding explains."""
        spread = self.trained.log_probs.double().std().item()
        return self.rounding.share * max(self.rounding.least_spread, spread)

    @cached_property
    def misrouted(self) -> list[float]:
        """Share of the misrouted tokens of each layer with experts; empty if they are unknown."""
        return misrouted(self.trained.routes, self.served.routes, self.rounding.share)

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference; False for NaN."""
        return self.size <= self.tolerance and max(self.misrouted, default=0.0) <= MAX_MISROUTED

    @property
    def inequality(self) -> str:
        """Number of unequal log-probabilities, and the largest difference; "" if all are equal."""
        differences = self._differences
        num_unequal = int((differences != 0).sum())  # NaN is unequal
        if not num_unequal:
            return ""
        return (
            f"log-probabilities of {num_unequal} of {differences.numel()} tokens differ, "
            f"by at most {differences.max().item():.3g} nats"
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        differences = self._differences
        farthest = int(differences.nan_to_num(torch.inf).argmax())
        row, column = divmod(farthest, differences.shape[1])
        token_id = int(self.tokens[row, column + 1])
        by_trainer = self.trained.log_probs[row, column].item()
        most = max(self.misrouted, default=0.0)
        routes = f"; at most {most:.2%} of the tokens of a layer are misrouted" * bool(
            self.misrouted
        )
        by_other = self.served.log_probs[row, column].item()
        return (
            f"log-probabilities of {differences.numel()} tokens are {self.size:.3g} nats apart "
            f"(quantile {self.rounding.quantile:g}), rounding of {dtype} explains "
            f"{self.tolerance:g}; "
            f"furthest apart is token {token_id} at position {column + 1} of sequence {row}, "
            f"{by_trainer:.4f} by the trainer and {by_other:.4f} by {self.name}{routes}"
        )


def max_length_of(limits: Sequence[ProbeLimits]) -> int | None:
    """Return the maximum length in tokens that all sides can compute; None if unlimited."""
    return min((limit.max_length for limit in limits if limit.max_length is not None), default=None)


def tokens_within(
    limits: Sequence[ProbeLimits],
    windows: Collection[int] = (),
) -> tuple[str, torch.Tensor | None]:
    """Return ("", token ids [B, L]) that all sides can compute, or (reason, None).

    Every job gets the same ids. Sequences are `LENGTH` tokens longer than the longest of `windows`
    that fits within the limits.
    """
    refusal = next((limit.refusal for limit in limits if limit.refusal), "")
    if refusal:
        return refusal, None
    multiple = math.lcm(*(limit.multiple for limit in limits))
    max_length = max_length_of(limits)
    bound = LONGEST if max_length is None else min(LONGEST, max_length)
    reachable = [size for size in windows if LENGTH + size <= bound]
    longest = LENGTH + max(reachable, default=0)
    if max_length is not None:
        longest = min(longest, max_length)
    length = longest // multiple * multiple
    if length < SHORTEST:
        reason = (
            f"sequences of at most {longest} tokens, and of a multiple of {multiple}, are too short"
        )
        return reason, None
    vocab_size = min(limit.vocab_size for limit in limits)
    generator = torch.Generator().manual_seed(0)
    return "", torch.randint(vocab_size, (NUM_ROWS, length), generator=generator)
