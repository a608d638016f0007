"""Group "rl": where --enable-resharding enters Megatron-LM's own RL, `train_rl.py --perform-rl-step`; since 0.19.

    rl_utils.get_inference_interface
      MegatronLocal.launch      with_rollouts      the engine answers agents, in place of Megatron's inference engine

Applied once Megatron has validated its arguments, in both ways in which resharding comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch
from megatron_patches.script import required_engine

SINCE = "0.19.0"
"""The megatron-core whose RL this is for: before, its interfaces were others."""


def with_rollouts(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the class method `launch(cls, model, **kwargs)` of a server, which is called on every rank."""

    async def launch_rollouts(cls: type, model: Any, **kwargs: Any) -> Any:
        return await required_engine().launch_rollouts()

    return launch_rollouts


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="rl.with_rollouts",
        group="rl",
        target="megatron.rl.inference.megatron:MegatronLocal.launch",
        reason="builds Megatron's inference engine around the model that is trained, or around a second one",
        remove_when="rl_utils takes the class of its inference interface from an argument",
        build=with_rollouts,
        since=SINCE,
    ),
)
