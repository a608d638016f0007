"""`ScriptEngine`: what Megatron's own training loop calls under --enable-resharding (`megatron_patches.engines`).

It records every switch:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.attaching.attachment import model_findings
from hybrid_engine.attaching.matching import vocabulary_mismatches
from hybrid_engine.backends.vllm import Completion
from hybrid_engine.backends.vllm.process_state import random_state_kept
from hybrid_engine.backends.vllm.requests import sampling_params
from hybrid_engine.errors import ConfigError, DependencyError, FileError, StateError, Violation
from hybrid_engine.files.durable import append_text, is_disk_full, naming
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.megatron_script.script_settings import Prompt, ScriptSettings, read_settings
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from megatron_patches.buffers import buffer_allocator
from megatron_patches.engines import MegatronScript
from megatron_patches.errors import ScriptError

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.live_model import LiveModel


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


@contextmanager
def _listing() -> Iterator[None]:
    """Turn errors in settings into ScriptError, which ends a script of Megatron's without a traceback."""
    try:
        yield
    except ConfigError as error:
        _refuse(error.findings)
    except DependencyError as error:
        raise ScriptError([str(error)]) from error


def _refuse(found: Sequence[Violation]) -> None:
    if found:
        raise ScriptError([str(violation) for violation in found])


class ScriptEngine:
    """vLLM beside Megatron's live model. Outside of `switch` training state is on the device, bitwise what it was.

    Touches no random state, hooks nothing into the model, and adds nothing to what Megatron saves.
    """

    def __init__(self, script: MegatronScript) -> None:
        """Check everything that can be checked before a process group exists. Raises ScriptError."""
        from hybrid_engine.backends.vllm import require_vllm

        self._script = script
        with _listing():
            self.settings: ScriptSettings = read_settings(script)
            generate = self.settings.config.generate_config
            if not generate.servers:
                require_vllm(allow_version=script.options.allow_version or generate.allow_version)

    @contextmanager
    def building(self) -> Iterator[None]:
        """DDP's buffers are made in elastic memory. Raises ScriptError when the tokenizer does not fit the model."""
        _refuse(vocabulary_mismatches(self.settings.table, self._script.args))
        with buffer_allocator(allocate_elastic):
            yield

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Parameters outside of DDP's buffers join those in elastic memory.

        Raises ScriptError for a model that is not what the arguments say, as one built by the script's own function.
        """
        from hybrid_engine.backends.megatron.model_tensors import move_loose_parameters

        with _listing():
            source = f"{self.settings.config.model}/config.json"
            _refuse(model_findings(self.settings.table, model_chunks, source))
        move_loose_parameters(model_chunks)

    def attach(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
        """Build vLLM and the plan. The weight version goes on from `num_steps`.

        What fails on one rank is raised on all of them, by the timeout of the configuration at the latest.
        """
        config = self.settings.config
        with Ends() as undo:  # the last first, each even if another fails
            self.job = undo.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
            with self.job.agreement.building():
                find_model = partial(self._live_model, model_chunks, optimizer, num_steps)
                self.hybrid = HybridEngine.beside(find_model, config, self.settings.table, self.job, undo)
                self.inference = self.hybrid.inference
                with self.job.agreement.phase("prompts and output"):
                    self._read_prompts()
            self._ends = undo.pop_all()

    def _live_model(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> LiveModel:
        from hybrid_engine.backends.megatron.live_model import live_model

        return live_model(model_chunks, optimizer, self.settings.table, num_steps=num_steps)

    def _read_prompts(self) -> None:
        self._tokens = [self._tokenize(prompt) for prompt in self.settings.prompts]
        self.inference.check_prompts(self._tokens, self.settings.sampling.max_tokens or 1)
        if not self.settings.config.generate_config.servers:
            # what vLLM refuses, it refuses before training starts
            sampling_params(self.settings.sampling, self.inference.tokenizer)
        self._journal = Journal(self._script, self.settings.output, self.job.rank == 0)

    def switch(self, iteration: int) -> None:
        """To inference, completions, callback, and back. Raises WeightError when --resharding-verify finds a bit.

        What fails on one rank is raised on all of them, unless the others wait for it in a collective of the callback.
        """
        with self._journal.apart_from_training():
            reports = [self._enter(State.INFER, TIMERS[0])]
            with self._journal.timed(TIMERS[1]), self.hybrid.rollout_context():
                completions = self._generate(iteration)
                in_training = self._call(self.settings.callback, self.inference)
            reports.append(self._enter(State.TRAIN, TIMERS[2]))
            self._call(in_training, self.hybrid.train.chunks)
            with self.job.agreement.phase("journal"):
                samples = self._journal.samples(iteration, self.settings.prompts, self._tokens, completions)
                self._journal.note(iteration, reports, samples)
            self._journal.log_times(iteration)

    def _call(self, callback: Callable[[Any], Any] | None, argument: Any) -> Any:
        """What the user's function, if there is one, returns; all ranks fail when it fails on one.

        It draws from no generator of training's.
        """
        if self.settings.callback is None:
            return None
        with self.job.agreement.phase("callback"), random_state_kept():
            try:
                return None if callback is None else callback(argument)
            except SystemExit as error:  # of one rank alone it would leave the others waiting
                raise StateError(f"--resharding-callback asked to exit: {error}") from error

    def detach(self) -> None:
        """End vLLM, the transports and our process groups; Megatron's groups and model stay."""
        self._ends.close()

    def _enter(self, state: State, timer: str) -> ReshardReport:
        with self._journal.timed(timer):
            report = self.hybrid.sharding.enter(state)
        assert report is not None  # each switch leaves the state that the one before entered
        return report

    def _generate(self, iteration: int) -> list[list[Any]]:
        """Without a seed of the user's that of the iteration: a resumed run draws what the first would have drawn."""
        if not self._tokens:
            return []
        sampling = self.settings.sampling
        if sampling.seed is None:
            seed = text_digest(str(self.settings.config.generate_config.seed), str(iteration))
            sampling = replace(sampling, seed=seed)
        return self.inference.generate_over_replicas(self._tokens, sampling)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        return list(self._script.tokenizer.tokenize(prompt)) if isinstance(prompt, str) else list(prompt)
