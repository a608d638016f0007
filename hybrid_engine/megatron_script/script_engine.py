"""`ScriptEngine`: the engine that Megatron's training loop calls under --enable-resharding.

It implements the protocol of `megatron_patches.engines`, and records every switch:

    <output>/samples.jsonl     a line per completion: iteration, prompt, tokens, log-probabilities,
                               and the text if the prompt was text
    <output>/switches.jsonl    a line per switch: the report of rank 0

and by Megatron's own means: timers on the console, scalars and the samples' text in TensorBoard
and W&B.

A full disk does not end the training run. Lines that do not fit are dropped whole, with a warning
that counts them, and later lines are written again once there is space. Any other error about these
files ends the run on all ranks. A line that a kill has cut off is removed before the next one is
appended.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.assembly import inference_side
from hybrid_engine.attaching.attachment import model_findings
from hybrid_engine.attaching.config_check import vocabulary_mismatches
from hybrid_engine.backends.vllm import Completion
from hybrid_engine.backends.vllm.process_state import random_state_kept
from hybrid_engine.errors import ConfigError, DependencyError, FileError, StateError, Violation
from hybrid_engine.files.durable import append_text, is_disk_full, naming
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.megatron_script.script_settings import Prompt, ScriptSettings, read_settings
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from megatron_patches.buffers import buffer_allocator
from megatron_patches.engines import MegatronScript
from megatron_patches.errors import ScriptError

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.live_model import LiveModel


logger = logging.getLogger("hybrid_engine")

TIMERS = ("resharding-to-inference", "resharding-generate", "resharding-to-training")
"""Names of Megatron's timers, in the order of a round trip."""

_SAMPLES = "resharding/samples"
_COLUMNS = ("prompt", "completion", "finish reason")

Sample = dict[str, Any]
"""A line of samples.jsonl."""


class Journal:
    """Files and writers of a run. Rank 0 writes the files; timers are collective.

    Args:
        script: has Megatron's timers, writers and tokenizer.
        output: directory, which is created; None: no files are written.
        is_writer: this is rank 0.

    Attributes:
        num_dropped: number of lines that did not fit on the disk, by file.
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
        """Exclude the block from Megatron's time per iteration, as Megatron does for evaluation."""
        interval = self._script.timers("interval-time", log_level=0)
        # Restarted even if the block fails, because Megatron stops this timer again later.
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
        token_ids: Sequence[Sequence[int]],
        groups: Sequence[Sequence[Completion]],
    ) -> list[Sample]:
        """Return a record of every completion.

        Args:
            iteration: Megatron's iteration.
            prompts: the prompts, as the user gave them.
            token_ids: token ids of each prompt.
            groups: completions of each prompt.
        """
        samples: list[Sample] = []
        for prompt, ids, group in zip(prompts, token_ids, groups, strict=True):
            for completion in group:
                text = {}
                if isinstance(prompt, str):
                    answer = self._script.tokenizer.detokenize(list(completion.token_ids))
                    text = {"prompt": prompt, "text": answer}
                samples.append(
                    {
                        "iteration": iteration,
                        **text,
                        "prompt_token_ids": list(ids),
                        "token_ids": list(completion.token_ids),
                        "log_probs": list(completion.logprobs),
                        "finish_reason": completion.finish_reason,
                    }
                )
        return samples

    def record(
        self,
        iteration: int,
        reports: Sequence[ReshardReport],
        samples: Sequence[Sample],
    ) -> None:
        """Write a round trip to the files and to Megatron's writers.

        Files and writers exist on one rank each, not necessarily the same.
        """
        self._append("samples.jsonl", samples)
        switches = ({"iteration": iteration, **report.as_dict()} for report in reports)
        self._append("switches.jsonl", switches)
        scalars = _scalars(reports, samples)
        writer = self._script.tensorboard_writer
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
            if samples:
                writer.add_text(_SAMPLES, _markdown(samples), iteration)
        wandb = self._script.wandb_writer
        if wandb is not None:
            rows = [_row(sample) for sample in samples]
            values: dict[str, Any] = dict(scalars)
            if rows:
                values[_SAMPLES] = wandb.Table(columns=list(_COLUMNS), data=rows)
            wandb.log(values, iteration)

    def log_times(self, iteration: int) -> None:
        """Write Megatron's timers of a round trip to the console and its writers. Collective."""
        timers = self._script.timers
        # Without a reset, so that timers.log, which resets them, has the same times.
        for writer in (self._script.tensorboard_writer, self._script.wandb_writer):
            timers.write(list(TIMERS), writer, iteration, reset=False)
        timers.log(list(TIMERS))

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to a file. If the disk is full, drop and count them."""
        if self._output is None:
            return
        # One write for all lines, which succeeds or fails as a whole.
        lines = [json.dumps(record) + "\n" for record in records]
        try:
            append_text(self._output / name, "".join(lines))
        except FileError as error:
            # Only samples and timings are lost, which is not worth the end of a training run.
            if not is_disk_full(error):
                raise
            self.num_dropped[name] += len(lines)
            logger.warning(
                "[Reshard] %s; %d lines dropped so far, training goes on",
                error,
                self.num_dropped[name],
            )


def _row(sample: Sample) -> list[str]:
    """Return the values of _COLUMNS: text, or token ids if the prompt was token ids."""
    prompt = sample.get("prompt", sample["prompt_token_ids"])
    completion = sample.get("text", sample["token_ids"])
    return [str(prompt), str(completion), sample["finish_reason"]]


def _markdown(samples: Sequence[Sample]) -> str:
    """Return the samples as Markdown, indented so that it is shown verbatim."""
    # Four spaces make a code block, in which no character of a sample is markup.
    texts = []
    for sample in samples:
        prompt, completion, _ = _row(sample)
        texts.append(textwrap.indent(f"{prompt}\n=> {completion}", "    ", lambda line: True))
    return "\n\n".join(texts)


def _scalars(reports: Sequence[ReshardReport], samples: Sequence[Sample]) -> dict[str, float]:
    """Return the scalars of a round trip: seconds, gigabytes, and means over the samples."""
    scalars = {f"resharding/{report.direction} seconds": report.seconds for report in reports}
    num_bytes = sum(report.bytes_received for report in reports)
    scalars["resharding/gigabytes received"] = num_bytes / 1e9
    scalars["resharding/peak gigabytes"] = max(report.peak_bytes for report in reports) / 1e9
    if samples:
        num_tokens = sum(len(sample["token_ids"]) for sample in samples)
        scalars["resharding/completion tokens"] = num_tokens / len(samples)
    log_probs = [value for sample in samples for value in sample["log_probs"]]
    if log_probs:
        scalars["resharding/mean log-probability"] = sum(log_probs) / len(log_probs)
    return scalars


@contextmanager
def _as_script_error() -> Iterator[None]:
    """Turn errors in settings into ScriptError, which ends Megatron's script without traceback."""
    try:
        yield
    except ConfigError as error:
        _require_none(error.findings)
    except DependencyError as error:
        raise ScriptError([str(error)]) from error


def _require_none(violations: Sequence[Violation]) -> None:
    """Raise ScriptError if there are violations."""
    if violations:
        raise ScriptError([str(violation) for violation in violations])


class ScriptEngine:
    """vLLM beside Megatron's live model.

    Outside of `switch` training state is on the device, bitwise unchanged. The engine touches no
    random state, installs no hooks in the model, and adds nothing to Megatron's checkpoints.
    """

    def __init__(self, script: MegatronScript) -> None:
        """Check everything that can be checked without a process group. Raises ScriptError."""
        self._script = script
        with _as_script_error():
            self.settings: ScriptSettings = read_settings(script)
            side = inference_side(self.settings.config)
            side.require_packages(allow_version=script.options.allow_version)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Allocate DDP's buffers in elastic memory inside the block.

        Raises ScriptError if the tokenizer does not fit the model.
        """
        # Not in the constructor: Megatron builds its tokenizer after it has validated arguments.
        _require_none(vocabulary_mismatches(self.settings.table, self._script.args))
        with buffer_allocator(allocate_elastic):
            yield

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Move parameters outside of DDP's buffers to elastic memory.

        Raises ScriptError if the model differs from the arguments, which is possible if the
        script has its own function to build it.
        """
        from hybrid_engine.backends.megatron.model_tensors import move_loose_parameters

        with _as_script_error():
            source = f"{self.settings.config.model}/config.json"
            _require_none(model_findings(self.settings.table, model_chunks, source))
        move_loose_parameters(model_chunks)

    def attach(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
        """Build vLLM and the plan. The weight version continues from `num_steps`.

        A failure of one rank is raised on all ranks, at the latest after the configured timeout.
        """
        config = self.settings.config
        self._model_chunks = list(model_chunks)
        # Ends in reverse order, each one even if another fails.
        with Ends() as undo:
            self.job = undo.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with self.job.building():
                with self.job.agreement.phase("looking at the training model"):
                    train = self._live_model(model_chunks, optimizer, num_steps)
                self.hybrid = HybridEngine.beside(
                    train, config, self.settings.table, self.job, undo
                )
                self.inference = self.hybrid.inference
                with self.job.agreement.phase("prompts and output"):
                    self._prepare_prompts()
            # Nothing has failed: keep the engines until `detach`.
            self._ends = undo.pop_all()

    def _live_model(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> LiveModel:
        from hybrid_engine.backends.megatron.live_model import live_model

        return live_model(model_chunks, optimizer, self.settings.table, num_steps=num_steps)

    def _prepare_prompts(self) -> None:
        """Tokenize the prompts and create the journal; fail before training starts."""
        self._token_ids: list[list[int]] = []
        for prompt in self.settings.prompts:
            if isinstance(prompt, str):
                self._token_ids.append(list(self._script.tokenizer.tokenize(prompt)))
            else:
                self._token_ids.append(list(prompt))
        sampling = self.settings.sampling
        self.inference.check_prompts(self._token_ids, sampling.max_tokens or 1)
        self.inference.params_of(sampling)
        self._journal = Journal(self._script, self.settings.output, self.job.rank == 0)

    def switch(self, iteration: int) -> None:
        """Switch to inference, generate, run the callback, and switch back.

        A failure of one rank is raised on all ranks, unless the others wait for it in a collective
        of the callback.

        Raises WeightError if --resharding-verify finds a difference.
        """
        with self._journal.apart_from_training():
            reports = [self._enter(State.INFER, TIMERS[0])]
            with self._journal.timed(TIMERS[1]), self.hybrid.rollout_context():
                # After the completions, so that a callback can use the engine as it likes.
                groups = self._generate(iteration)
                in_training = self._run_callback(self.settings.callback, self.inference)
            reports.append(self._enter(State.TRAIN, TIMERS[2]))
            self._run_callback(in_training, self._model_chunks)
            with self.job.agreement.phase("journal"):
                samples = self._journal.samples(
                    iteration, self.settings.prompts, self._token_ids, groups
                )
                self._journal.record(iteration, reports, samples)
            self._journal.log_times(iteration)

    def _run_callback(self, callback: Callable[[Any], Any] | None, argument: Any) -> Any:
        """Call the user's function, if there is one, and return its result.

        All ranks fail if it fails on one. It does not advance training's random generators.
        """
        # Without a callback no rank meets the others here. With one, all ranks do, even those on
        # which it returned no function for the second call.
        if self.settings.callback is None:
            return None
        with self.job.agreement.phase("callback"), random_state_kept():
            try:
                return None if callback is None else callback(argument)
            except SystemExit as error:
                # If one rank exited, the others would wait for it.
                raise StateError(
                    f"--resharding-callback asked to exit: {error}", code="callback-exited"
                ) from error

    def detach(self) -> None:
        """End vLLM, the transports and our process groups; Megatron's groups and model stay."""
        self._ends.close()

    def _enter(self, state: State, timer: str) -> ReshardReport:
        with self._journal.timed(timer):
            report = self.hybrid.sharding.enter(state)
        assert report is not None  # each switch leaves the state that the last one entered
        return report

    def _generate(self, iteration: int) -> list[list[Any]]:
        """Complete the prompts.

        Without a seed of the user the seed follows from the iteration, so that a resumed run draws
        the same completions as an uninterrupted one.
        """
        if not self._token_ids:
            return []
        sampling = self.settings.sampling
        if sampling.seed is None:
            seed = text_digest(str(self.settings.config.generate_config.seed), str(iteration))
            sampling = replace(sampling, seed=seed)
        return self.inference.generate_over_replicas(self._token_ids, sampling)
