"""Records the switches of a run.

<output>/samples.jsonl     a line per completion: iteration, prompt, tokens, log-probabilities, text where there is any
<output>/switches.jsonl    a line per switch: the report of rank 0

and, through Megatron's own means: timers on the console, scalars and the samples' text in TensorBoard and W&B.

A full disk does not end the training run: lines that do not fit are dropped whole, with a warning that counts them, and
later ones are written once there is space. Any other error about these files ends the run on all ranks. A line that a
kill cut short is removed before the next is added.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import FileError
from hybrid_engine.files.durable import append_text, is_disk_full, naming
from hybrid_engine.megatron_script.script_settings import Prompt
from hybrid_engine.switch.report import ReshardReport
from megatron_patches.engines import MegatronScript

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion

logger = logging.getLogger("hybrid_engine")

TIMERS = ("resharding-to-inference", "resharding-generate", "resharding-to-training")
"""Names of Megatron's timers, in the order of a switch."""

_SAMPLES = "resharding/samples"
_COLUMNS = ("prompt", "completion", "finish reason")

Sample = dict[str, Any]
"""A line of samples.jsonl."""


class Journal:
    """Writes files on rank 0 only; timers are collective.

    Args:
        script: gives Megatron's timers, writers and tokenizer.
        output: directory, which is created; None: no files are written.
        is_writer: whether this is rank 0.
    """

    def __init__(self, script: MegatronScript, output: Path | None, is_writer: bool) -> None:
        self._script = script
        self._output = output if is_writer else None
        self.num_dropped: Counter[str] = Counter()
        if self._output is not None:
            with naming("creating", self._output):
                self._output.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def apart_from_training(self) -> Iterator[None]:
        """Exclude the block from Megatron's time per iteration, as Megatron does for its evaluation."""
        interval = self._script.timers("interval-time", log_level=0)
        interval.stop()
        try:
            yield
        finally:
            interval.start(barrier=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block with one of TIMERS."""
        timer = self._script.timers(name, log_level=0)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def samples(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        tokens: Sequence[Sequence[int]],
        found: Sequence[Sequence[Completion]],
    ) -> list[Sample]:
        """Return a record of every completion; `tokens` are the prompts' token ids, `found` their completions."""
        return [
            self._sample(iteration, prompt, ids, completion)
            for prompt, ids, completions in zip(prompts, tokens, found, strict=True)
            for completion in completions
        ]

    def _sample(self, iteration: int, prompt: Prompt, ids: Sequence[int], completion: Completion) -> Sample:
        text = {}
        if isinstance(prompt, str):
            text = {"prompt": prompt, "text": self._script.tokenizer.detokenize(list(completion.token_ids))}
        return {
            "iteration": iteration,
            **text,
            "prompt_token_ids": list(ids),
            "token_ids": list(completion.token_ids),
            "log_probs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def note(self, iteration: int, reports: Sequence[ReshardReport], samples: Sequence[Sample]) -> None:
        """Write one round trip to the files and to Megatron's writers, each on the one rank that has it."""
        self._append("samples.jsonl", samples)
        self._append("switches.jsonl", ({"iteration": iteration, **report.as_dict()} for report in reports))
        scalars = _scalars(reports, samples)
        if (writer := self._script.tensorboard_writer) is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
            if samples:
                writer.add_text(_SAMPLES, _markdown(samples), iteration)
        if (wandb := self._script.wandb_writer) is not None:
            rows = [_row(sample) for sample in samples]
            table = {_SAMPLES: wandb.Table(columns=list(_COLUMNS), data=rows)} if rows else {}
            wandb.log({**scalars, **table}, iteration)

    def log_times(self, iteration: int) -> None:
        """Write Megatron's timers of one round trip to the console and its writers. Collective."""
        timers = self._script.timers
        for writer in (self._script.tensorboard_writer, self._script.wandb_writer):
            timers.write(list(TIMERS), writer, iteration, reset=False)
        timers.log(list(TIMERS))

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if self._output is None:
            return
        lines = [json.dumps(record) + "\n" for record in records]
        try:
            append_text(self._output / name, "".join(lines))
        except FileError as error:
            if not is_disk_full(error):
                raise
            self.num_dropped[name] += len(lines)
            logger.warning("[Reshard] %s; %d lines dropped so far, training goes on", error, self.num_dropped[name])


def _row(sample: Sample) -> list[str]:
    """Return the values of _COLUMNS: text, or token ids where the prompt was given as such."""
    prompt = sample.get("prompt", sample["prompt_token_ids"])
    return [str(prompt), str(sample.get("text", sample["token_ids"])), sample["finish_reason"]]


def _markdown(samples: Sequence[Sample]) -> str:
    """Return the samples as text that Markdown shows verbatim, since it is indented."""
    texts = (f"{prompt}\n=> {completion}" for prompt, completion, _ in map(_row, samples))
    return "\n\n".join(textwrap.indent(text, "    ", lambda line: True) for text in texts)


def _scalars(reports: Sequence[ReshardReport], samples: Sequence[Sample]) -> dict[str, float]:
    scalars = {f"resharding/{report.direction} seconds": report.seconds for report in reports}
    scalars["resharding/gigabytes received"] = sum(report.bytes_received for report in reports) / 1e9
    scalars["resharding/peak gigabytes"] = max(report.peak_bytes for report in reports) / 1e9
    log_probs = [value for sample in samples for value in sample["log_probs"]]
    if samples:
        scalars["resharding/completion tokens"] = sum(len(one["token_ids"]) for one in samples) / len(samples)
    if log_probs:
        scalars["resharding/mean log-probability"] = sum(log_probs) / len(log_probs)
    return scalars
