"""`RolloutEngine`: `--perform-rl-step` of train_rl.py, with vLLM servers for its rollouts.

Megatron's loop says when to switch, by its own calls (backends/megatron/rl_interface.py), not this package's interval:

    every --grpo-iterations   resume    -> publish     the switch in place of `swap_model_weights`
                              agents    -> complete    on rank 0
                              suspend   -> withdraw    old and reference log-probabilities, then steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling
from hybrid_engine.errors import ArgumentError, Violation
from hybrid_engine.megatron_script.script_engine import Journal, ScriptEngine
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.rl_interface import ServedRollouts
    from hybrid_engine.backends.vllm.server.inference import ServedInference


class RolloutEngine(ScriptEngine):
    """vLLM servers beside Megatron's live model, in its RL loop; a `rl_interface.Rollouts`."""

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Raises ScriptError as `ScriptEngine` does. Tokens that pad the vocabulary, which vLLM cannot draw, count no
        more in Megatron's log-probabilities."""
        super().model_built(model_chunks)
        from hybrid_engine.backends.megatron.forward_probe import hide_padding

        hide_padding(model_chunks, self.settings.table.dims.vocab_size)

    def switch(self, iteration: int) -> None:
        """Nothing: an optimizer step is no reason to switch."""

    def detach(self) -> None:
        """Nothing: Megatron may evaluate after training, and ends its interface at last."""

    async def launch_rollouts(self) -> ServedRollouts:
        from hybrid_engine.backends.megatron.rl_interface import ServedRollouts

        return await ServedRollouts.launch(self)

    # -- what the interface calls --------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self.job.rank == 0

    @property
    def most_requests(self) -> int:
        args = self._script.args
        return max(args.grpo_prompts_per_step * args.grpo_group_size, args.rl_prompts_per_eval)

    def publish(self) -> None:
        """Give the servers the present weights; training state leaves the device. Collective."""
        self._reports: list[ReshardReport | None] = [self.hybrid.sharding.enter(State.INFER)]

    def meet(self, *, is_done: bool) -> bool:
        """Whether the first rank is done. Collective; raises what failed on another rank."""
        (done,) = self.job.agreement.any_of([is_done], "collecting rollouts")
        return done

    def withdraw(self) -> None:
        """Bring training state back, and note both switches. Collective."""
        self._reports.append(self.hybrid.sharding.enter(State.TRAIN))
        with self.job.agreement.phase("journal"):
            reports = [report for report in self._reports if report is not None]
            self._journal.note(self._script.args.curr_iteration, reports, ())

    def complete(
        self, prompt: list[int], *, end_token: int, max_tokens: int, temperature: float, top_p: float, top_k: int
    ) -> Completion:
        """Draw one completion, on this rank alone.

        Raises ConfigError for a prompt or a sampling that cannot be, GenerationError, ServerError.
        """
        if max_tokens < 1:
            problem, remedy = f"{len(prompt)} tokens, which leaves none to draw", "Raise --inference-max-seq-length"
            raise ArgumentError([Violation("prompt", problem, remedy)])
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            stop_token_ids=(end_token,),
            ignore_eos=True,  # Megatron knows the end token of its tokenizer alone
        )
        return cast("ServedInference", self.inference).complete_one(prompt, sampling)

    def end(self) -> None:
        """End the transports and our process groups; servers and Megatron's groups stay. Collective."""
        self._ends.close()

    def _read_prompts(self) -> None:
        """Prompts are Megatron's environments'."""
        self._journal = Journal(self._script, self.settings.output, self.job.rank == 0)
