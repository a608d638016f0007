"""What a run tells of its switches.

<output>/samples.jsonl     a line per completion: iteration, prompt, tokens, log-probabilities, text where there is any
<output>/switches.jsonl    a line per switch: the report of rank 0

and, through Megatron's own means: timers on the console, scalars in TensorBoard and W&B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.megatron_script.settings import Prompt
from hybrid_engine.report import ReshardReport
from megatron_patches.engines import MegatronScript

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion

TIMERS = ("resharding-to-inference", "resharding-generate", "resharding-to-training")
"""Names of Megatron's timers, in the order of a switch."""


class Journal:
    """Writes files on rank 0 only; timers are collective.

    Args:
        script: gives Megatron's timers, writers and tokenizer.
        output: directory, made here; None writes no files.
        is_writer: whether this is rank 0.
    """

    def __init__(self, script: MegatronScript, output: Path | None, is_writer: bool) -> None:
        self._script = script
        self._output = output if is_writer else None
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def apart_from_training(self) -> Iterator[None]:
        """Megatron's time per iteration does not count what happens inside, as with its evaluation."""
        interval = self._script.timers("interval-time", log_level=0)
        interval.stop()
        try:
            yield
        finally:
            interval.start(barrier=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """One of TIMERS."""
        timer = self._script.timers(name, log_level=0)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def note_samples(
        self, iteration: int, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], found: Sequence[Sequence[Any]]
    ) -> None:
        """Completions of every prompt; `tokens` are the prompts' token ids."""
        records = (
            self._sample(iteration, prompt, ids, completion)
            for prompt, ids, completions in zip(prompts, tokens, found, strict=True)
            for completion in completions
        )
        self._append("samples.jsonl", records)

    def _sample(self, iteration: int, prompt: Prompt, ids: Sequence[int], completion: Completion) -> dict[str, Any]:
        is_text = isinstance(prompt, str)
        text = {"prompt": prompt, "text": self._script.tokenizer.detokenize(list(completion.token_ids))}
        return {
            "iteration": iteration,
            **(text if is_text else {}),
            "prompt_token_ids": list(ids),
            "token_ids": list(completion.token_ids),
            "log_probs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def note_reports(self, iteration: int, reports: Sequence[ReshardReport]) -> None:
        """The switches of one round trip."""
        self._append("switches.jsonl", ({"iteration": iteration, **report.as_dict()} for report in reports))

    def log(
        self, iteration: int, reports: Sequence[ReshardReport], completions: Sequence[Sequence[Completion]]
    ) -> None:
        """Timings of one round trip, everywhere where Megatron logs. Collective."""
        timers, writer = self._script.timers, self._script.tensorboard_writer
        for one in (writer, self._script.wandb_writer):
            timers.write(list(TIMERS), one, iteration, reset=False)
        timers.log(list(TIMERS))
        scalars = _scalars(reports, [one for many in completions for one in many])
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if self._script.wandb_writer is not None:
            self._script.wandb_writer.log(scalars, iteration)

    def _append(self, name: str, records: Iterator[Mapping[str, Any]] | Any) -> None:
        if self._output is None:
            return
        with (self._output / name).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _scalars(reports: Sequence[ReshardReport], completions: Sequence[Completion]) -> dict[str, float]:
    scalars = {f"resharding/{report.direction} seconds": report.seconds for report in reports}
    scalars["resharding/gigabytes received"] = sum(report.bytes_received for report in reports) / 1e9
    scalars["resharding/peak gigabytes"] = max(report.peak_bytes for report in reports) / 1e9
    log_probs = [value for completion in completions for value in completion.logprobs]
    if completions:
        scalars["resharding/completion tokens"] = sum(len(one.token_ids) for one in completions) / len(completions)
    if log_probs:
        scalars["resharding/mean log-probability"] = sum(log_probs) / len(log_probs)
    return scalars
