"""`ScriptEngine`: what Megatron's own training loop calls under --enable-resharding (`megatron_patches.engines`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_engine.attaching.engine_beside import engine_beside
from hybrid_engine.attaching.live_config import model_findings
from hybrid_engine.attaching.matching import vocabulary_mismatches
from hybrid_engine.backends.vllm.generation.sampling_params import sampling_params
from hybrid_engine.backends.vllm.process.random_state import random_state_kept
from hybrid_engine.errors import ConfigError, DependencyError, StateError, Violation
from hybrid_engine.megatron_script.journal import TIMERS, Journal
from hybrid_engine.megatron_script.script_settings import Prompt, ScriptSettings, read_settings
from hybrid_engine.ranks.forks import Ends
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from megatron_patches.buffers import buffer_allocator
from megatron_patches.engines import MegatronScript
from megatron_patches.errors import ScriptError

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.live_model import LiveModel


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
            in_file = self.settings.config.generate_config.allow_version
            require_vllm(allow_version=script.options.allow_version or in_file)

    @contextmanager
    def building(self) -> Iterator[None]:
        """DDP's buffers are made in elastic memory. Raises ScriptError when the tokenizer does not fit the model."""
        _refuse(vocabulary_mismatches(self.settings.table, self._script.args))
        from hybrid_engine.memory.elastic import allocate_elastic

        with buffer_allocator(allocate_elastic):
            yield

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Parameters outside of DDP's buffers join those in elastic memory.

        Raises ScriptError for a model that is not what the arguments say, as one built by the script's own function.
        """
        from hybrid_engine.backends.megatron.elastic_weights import move_loose_parameters

        with _listing():
            _refuse(model_findings(self.settings.table, model_chunks))
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
                self.hybrid = engine_beside(find_model, config, self.settings.table, self.job, undo)
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
        """The sampler starts from the iteration: a resumed run draws what the first would have drawn."""
        num_replicas = self.inference.settings.sizes.data
        self.inference.manual_seed(self.settings.config.generate_config.seed + iteration * num_replicas)
        if not self._tokens:
            return []
        return self.inference.generate_over_replicas(self._tokens, self.settings.sampling)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        return list(self._script.tokenizer.tokenize(prompt)) if isinstance(prompt, str) else list(prompt)
