"""Draws of tokens that vLLM 0.32 gets wrong on a CPU: of seeded requests, and with drafts.

A prompt may be computed in parts. After each part vLLM draws a token, drops it, and moves the
request's generator back. torch's CPU generators cannot be moved, and vLLM's engine ends with "CPU
Generator does not use offset". Here such tokens are drawn with spare generators, and those of the
requests stay where they are.

vLLM accepts drafts by the temperatures of their requests, which its CPU kernel writes to a copy of
uninitialised memory. Here torch expands them from requests to tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals

_patches = ExitStack()
"""Keeps vLLM's method replaced for the life of the process."""


class _SpareGenerator(torch.Generator):
    """A generator of tokens that are dropped; moving it has no effect."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def corrected(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method `sample_tokens` of a CPU worker, whose model runner is vLLM's first."""

    @functools.wraps(sample_tokens)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        batch = runner.input_batch
        dropped = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        generators = {row: batch.generators[row] for row in dropped if row in batch.generators}
        batch.generators.update({row: _SpareGenerator() for row in generators})
        try:
            with internals.EXPAND.replaced(lambda _: _by_token):
                return sample_tokens(self, *args, **kwargs)
        finally:
            batch.generators.update(generators)

    return sample


def _by_token(
    values: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return a value per drafted token, from one per request; `ends` counts tokens up to each."""
    nums = ends.diff(prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(nums, output_size=num_tokens)


def correct_workers() -> None:
    """Make this process's CPU workers of vLLM's own class draw like that."""
    _patches.close()
    _patches.enter_context(internals.SAMPLE_TOKENS.replaced(corrected))
