"""An environment for Megatron's RL, where its registry looks for user environments.

The reward is the share of lower-case letters. THEN is the action in the second collection: "wait",
"raise", or "kill" for the server, which runs in session SERVER.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

from megatron.rl.agent.reward_only_agent import RewardOnlyAgent
from megatron.training.global_vars import get_args


class AceMathAgent(RewardOnlyAgent):
    env_id: str = "letters"

    async def get_prompt(self, validation: bool) -> tuple[str, Any]:
        if os.environ["THEN"] == "kill" and get_args().curr_iteration == 1:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(os.environ["SERVER"]), signal.SIGKILL)
        if os.environ["THEN"] == "wait" and get_args().curr_iteration == 1 and not validation:
            await asyncio.sleep(25)
        first, second = random.choices("abcdefgh", k=2)
        return f"say {first} and {second}", {"problem_id": first + second}

    async def evaluation_prompts(
        self, num_prompts: int, validation: bool = False
    ) -> list[tuple[str, Any]]:
        return [await self.get_prompt(validation) for _ in range(num_prompts)]

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        if os.environ["THEN"] == "raise" and get_args().curr_iteration == 1:
            raise ValueError("no reward, on purpose")
        return sum(character.islower() for character in response) / max(1, len(response))
