"""Metrics of a step: figures of its completions, and the seconds, bytes and memory of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.compute_check.logprob_check import exactness
from hybrid_engine.errors import ArgumentError, ComputationError, shortened
from hybrid_engine.ports import Batch, Figures
from hybrid_engine.rl import losses
from hybrid_engine.rl.conversation_state import Conversation
from hybrid_engine.rl.rewards import Scores
from hybrid_engine.rl.user_callbacks import number_of
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion

Groups = Sequence[Sequence["Completion | Conversation"]]
"""n completions, or conversations, of each prompt."""
OnPhase = Callable[[str, int], None]
"""(phase, number of the step) -> None; called on every rank as a phase begins.

The phase is generate, reward, score, critic, update, checkpoint or evaluate.
"""

_TOTALS = ("bytes_received", "bytes_least")
_MAXIMA = ("peak_bytes", "rss_bytes")
_MINIMA = ("generation_wait_seconds",)
"""Servers wait only while no rank has requests."""


def completion_figures(batch: Batch, groups: Groups, scores: Scores) -> Figures:
    """Return figures of a step's completions, under the policy that drew them.

    Args:
        batch: has `mask`, `sampled_log_probs` and `old_log_probs`, all [B, S]; with a reference
            also `ref_log_probs` and `weights`.
        scores: rewards, in the order of `groups`.
    """
    rewards = scores.totals
    differences = rewards - rewards.nanmean(dim=1, keepdim=True)
    deviations = differences.square().nanmean(dim=1).sqrt()
    completions = [completion for group in groups for completion in group]
    reasons = [completion.finish_reason for completion in completions]
    log_prob_error = _log_prob_error(batch)
    figures = {
        "reward": rewards.nanmean().item(),
        "reward_std": deviations.nanmean().item(),
        **scores.figures(),
        "groups_agreeing": scores.agreeing.float().mean().item(),
        "response_tokens": batch["mask"].sum(dim=1).mean().item(),
        "truncated": reasons.count("length") / len(reasons),
    }
    if rewards.isnan().any():
        figures["left_out"] = rewards.isnan().float().mean().item()
    num_turns = [len(item.turns) for item in completions if isinstance(item, Conversation)]
    if num_turns:
        figures["turns"] = fmean(num_turns)
    # The largest shows an error of one token, the mean a small one of all.
    figures["logprob_diff"] = log_prob_error.max().item()
    figures["logprob_diff_mean"] = log_prob_error.mean().item()
    figures["logprob_equal"] = (log_prob_error == 0).float().mean().item()
    # Of the policy that drew the tokens: the estimator holds for no other.
    if "ref_log_probs" in batch:
        kl = losses.kl_estimate(batch["old_log_probs"], batch["ref_log_probs"])
        figures["kl"] = losses.weighted_mean(kl, batch["weights"]).item()
    return figures


def _log_prob_error(batch: Batch) -> torch.Tensor:
    """Return the absolute differences of vLLM's and the trainer's log-probabilities, [drawn]."""
    differences = (batch["sampled_log_probs"] - batch["old_log_probs"]).abs()
    return differences[batch["mask"].bool()]


def require_exact(batch: Batch, device: torch.device) -> None:
    """Raise ComputationError if a log-probability of vLLM's differs from the trainer's.

    `batch`: has `mask`, `sampled_log_probs` and `old_log_probs`, all [B, S].
    """
    differences = _log_prob_error(batch)
    num_unequal = int((differences != 0).sum())  # NaN is unequal
    if num_unequal:
        raise ComputationError(
            f"log-probabilities of {num_unequal} of {differences.numel()} drawn tokens differ "
            f"between vLLM and the trainer, by at most {differences.max().item():.3g} nats. "
            f"{exactness(device)}",
            code="rollout-unequal",
        )


def without_columns(report: Mapping[str, float], figures: Mapping[str, float]) -> Figures:
    """Return the report of a loss; a name that is a column already becomes `loss_NAME`."""
    taken = {"step", "entropy", *figures}
    return {f"loss_{name}" if name in taken else name: value for name, value in report.items()}


def evaluation_figures(returned: Any) -> Figures:
    """Convert the figures that the user's `evaluate` returned.

    Raises ArgumentError if they are not a mapping of names to numbers.
    """
    remedy = "Return a mapping of names to numbers"
    if not isinstance(returned, Mapping):
        raise ArgumentError.of(
            "evaluate", f"returned {shortened(returned)}", remedy, code="not-a-mapping"
        )
    figures = {}
    for name, value in returned.items():
        try:
            figures[str(name)] = number_of(value)
        except Exception as error:  # the value's own conversion can raise anything
            raise ArgumentError.of(
                "evaluate", f"{name} is {shortened(value)}", remedy, code="not-a-number"
            ) from error
    return figures


class StepMeter:
    """Seconds, bytes and memory of the current step on one rank.

    Attributes:
        step: number of the step.
    """

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase = on_phase
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start measuring a step. Everything that was measured before is discarded."""
        self.step = step
        self._start = time.perf_counter()
        self._measured: dict[str, float] = dict.fromkeys((*_TOTALS, "peak_bytes"), 0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Call `on_phase`, and add the duration of the block to the seconds of `name`."""
        self._on_phase(name, self.step)
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add to the seconds of `name`."""
        add_measurements(self._measured, {f"{name}_seconds": seconds})

    def count(self, report: ReshardReport) -> None:
        """Add a switch, with the seconds of each of its phases, and those of late copies."""
        switch: Figures = {
            "bytes_received": report.bytes_received,
            "bytes_least": report.bytes_least,
            "peak_bytes": report.peak_bytes,
            "reshard_seconds": report.seconds,
            "reshard_hidden_seconds": report.seconds_hidden,
            "reshard_exposed_seconds": report.seconds_exposed,
        }
        for phase, seconds in report.seconds_by_phase.items():
            switch[f"reshard_{phase.replace(' ', '_')}_seconds"] = seconds
        add_measurements(self._measured, switch)

    def take(self, worker: ActorHybridWorker) -> Figures:
        """Return the measurements since the last call, combined over all ranks. Collective."""
        # The second number is the resident set in pages.
        with open("/proc/self/statm") as file:
            resident_pages = int(file.read().split()[1])
        local: Figures = {
            "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
            **self._measured,
            "seconds": time.perf_counter() - self._start,
        }
        # Before the ranks meet: the wait for a slow rank belongs to the next interval.
        self.begin(self.step)
        of_ranks = worker.job.agreement.gather(local, dict[str, int | float], "metrics")
        return combine_ranks(of_ranks, are_totals=worker.reports_cover_all_ranks)


def combine_ranks(of_ranks: Sequence[Mapping[str, float]], *, are_totals: bool) -> Figures:
    """Combine the measurements of all ranks.

    Bytes are summed. Of seconds and memory the maximum counts, of seconds in which servers wait the
    minimum.

    `are_totals`: every rank reports the bytes of all ranks, as in switches with servers.
    """
    total = max if are_totals else sum
    ways = {**dict.fromkeys(_TOTALS, total), **dict.fromkeys(_MINIMA, min)}
    combined = {}
    # A phase of a switch may have run on some ranks only.
    for name in dict.fromkeys(name for measured in of_ranks for name in measured):
        # A step takes as long, and needs as much memory, as its worst rank.
        combine = ways.get(name, max)
        combined[name] = combine(measured.get(name, 0) for measured in of_ranks)
    return combined


def add_measurements(row: dict[str, Any], measured: Mapping[str, float]) -> None:
    """Add later measurements of the same step to its row, in place."""
    for name, value in measured.items():
        if name in _MAXIMA:
            row[name] = max(row.get(name, 0), value)
        else:
            row[name] = row.get(name, 0) + value
