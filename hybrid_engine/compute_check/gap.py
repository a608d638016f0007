"""Tokens that both sides compute, and the difference between their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits

NUM_ROWS = 2
"""Sequences per probe."""

LENGTH = 64
"""Tokens per sequence; more if a sliding window is to be exceeded."""

LONGEST = 256
"""Maximum tokens per sequence."""

SHORTEST = 4
"""Minimum tokens per sequence; shorter probes are not compared."""

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float32: 0.01,
    torch.float16: 0.03,
    torch.bfloat16: 0.1,
}
"""Dtype of the coarser side -> difference explained by rounding.

The difference is a fraction of the standard deviation of the trainer's log-probabilities. Two
unrelated functions differ by about one standard deviation; see docs/failures.md.
"""

LEAST_SPREAD = 0.2
"""Minimum standard deviation in nats.

An untrained model gives all tokens nearly the same log-probability, and its rounding errors are as
large as those of a trained model.
"""


@dataclass(frozen=True)
class Gap:
    """Difference between the trainer's and vLLM's answers to `tokens` [B, L]."""

    tokens: torch.Tensor
    trained: ProbeAnswer
    served: ProbeAnswer

    @property
    def _differences(self) -> torch.Tensor:
        """Absolute differences [B, L - 1] of the log-probabilities, in nats."""
        return (self.trained.log_probs.double() - self.served.log_probs.double()).abs()

    @property
    def median(self) -> float:
        """Median difference in nats, of the block of `LENGTH` positions in which it is largest.

        Blocks, because an effect of long sequences moves only the later positions. The median,
        because rounding may route a token to another expert of nearly equal score, which moves
        single tokens by about one nat, whereas a different function moves all tokens.
        """
        num_blocks = -(-self.tokens.shape[1] // LENGTH)
        blocks = self._differences.chunk(num_blocks, dim=1)
        return torch.stack([block.median() for block in blocks]).max().item()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the coarser side."""
        dtypes = (self.trained.dtype, self.served.dtype)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def tolerance(self) -> float:
        """Median difference in nats that rounding explains."""
        share = TOLERANCES.get(self.dtype, max(TOLERANCES.values()))
        spread = self.trained.log_probs.double().std().item()
        return share * max(LEAST_SPREAD, spread)

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference; False for NaN."""
        return self.median <= self.tolerance

    @property
    def is_zero(self) -> bool:
        """True if all log-probabilities are equal; False for NaN."""
        return bool((self._differences == 0).all())

    @property
    def inequality(self) -> str:
        """Number of unequal log-probabilities, and the largest difference."""
        differences = self._differences
        num_unequal = int((differences != 0).sum())
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
        by_vllm = self.served.log_probs[row, column].item()
        return (
            f"log-probabilities of {differences.numel()} tokens are {self.median:.3g} "
            f"nats apart (median), rounding of {dtype} explains {self.tolerance:g}; "
            f"furthest apart is token {token_id} at position {column + 1} of sequence {row}, "
            f"{by_trainer:.4f} by the trainer and {by_vllm:.4f} by vLLM"
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
