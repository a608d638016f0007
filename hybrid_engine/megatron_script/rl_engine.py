"""`RolloutEngine`: `--perform-rl-step` of train_rl.py, with vLLM servers for its rollouts.

Megatron's RL loop decides when to switch, by its own calls (backends/megatron/rl_interface.py). The
interval of `--resharding-interval` has no effect:

    every --grpo-iterations   resume    -> publish     the switch, instead of `swap_model_weights`
                              agents    -> complete    on rank 0
                              suspend   -> withdraw    old and reference log-probabilities, steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling
from hybrid_engine.errors import ArgumentError
from hybrid_engine.megatron_script.script_engine import Journal, ScriptEngine
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.rl_interface import ServedRollouts
    from hybrid_engine.backends.vllm.server.inference import ServedInference


class RolloutEngine(ScriptEngine):
    """vLLM servers beside Megatron's live model, in its RL loop."""

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Prepare the model as `ScriptEngine` does, and hide the padding of its vocabulary.

        Raises ScriptError as `ScriptEngine` does.
        """
        super().model_built(model_chunks)
        from hybrid_engine.backends.megatron.forward_probe import hide_padding

        # vLLM cannot draw the tokens that pad the vocabulary. If they counted in Megatron's
        # log-probabilities, the two engines would disagree.
        hide_padding(model_chunks, self.settings.table.dims.vocab_size)

    def switch(self, iteration: int) -> None:
        """Do nothing: Megatron's RL loop switches, not the optimizer step."""

    def detach(self) -> None:
        """Do nothing: Megatron may evaluate after training, and ends its interface afterwards."""

    async def launch_rollouts(self) -> ServedRollouts:
        from hybrid_engine.backends.megatron.rl_interface import ServedRollouts

        return await ServedRollouts.launch(self)

    # -- called by the interface --------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self.job.rank == 0

    @property
    def most_requests(self) -> int:
        args = self._script.args
        return max(args.grpo_prompts_per_step * args.grpo_group_size, args.rl_prompts_per_eval)

    def publish(self) -> None:
        """Publish the weights to the servers; training state leaves the device. Collective."""
        self._reports: list[ReshardReport | None] = [self.hybrid.sharding.enter(State.INFER)]

    def meet(self, *, is_done: bool) -> bool:
        """Return whether rank 0 is done. Collective; raises the failure of another rank."""
        (done,) = self.job.agreement.any_of([is_done], "collecting rollouts")
        return done

    def withdraw(self) -> None:
        """Bring training state back, and record both switches. Collective."""
        self._reports.append(self.hybrid.sharding.enter(State.TRAIN))
        with self.job.agreement.phase("journal"):
            # A switch has no report if the servers had the weights already.
            reports = [report for report in self._reports if report is not None]
            self._journal.record(self._script.args.curr_iteration, reports, ())

    def complete(self, prompt: list[int], **sampling: Any) -> Completion:
        """Draw one completion, on this rank only.

        Raises:
            ConfigError: the prompt or the sampling is invalid.
            GenerationError: vLLM failed.
            ServerError: the server cannot be reached, or refused the call.
        """
        if sampling["max_tokens"] < 1:
            raise ArgumentError.of(
                "prompt",
                f"{len(prompt)} tokens, which leaves none to draw",
                "Raise --inference-max-seq-length",
                code="prompt-too-long",
            )
        served = cast("ServedInference", self.inference)
        return served.complete_one(prompt, Sampling(**sampling))

    def end(self) -> None:
        """End the transports and our process groups; servers and Megatron's groups stay.

        Collective.
        """
        self._ends.close()

    def _prepare_prompts(self) -> None:
        """Create the journal. The prompts come from Megatron's environments."""
        self._journal = Journal(self._script, self.settings.output, self.job.rank == 0)
