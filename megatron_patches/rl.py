"""Group "rl": hooks of --enable-resharding in Megatron-LM's own RL, since 0.19.

    train_rl.py --perform-rl-step
      rl_utils.get_inference_interface
        MegatronLocal.launch    with_rollouts    the engine replaces Megatron's inference engine

Applied after Megatron has validated its arguments, for patched source trees and run-time patches
alike.
"""

from __future__ import annotations

from typing import Any

from megatron_patches.patch import Function, Patch, around
from megatron_patches.script import required_engine

SINCE = "0.19.0"
"""First supported megatron-core; the RL loop of earlier versions has other interfaces."""


@around
async def with_rollouts(launch: Function, cls: type, model: Any, **kwargs: Any) -> Any:
    """Replace the class method `launch(cls, model, **kwargs)` of a server.

    Megatron calls it on every rank.
    """
    return await required_engine().launch_rollouts()


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="rl.with_rollouts",
        group="rl",
        target="megatron.rl.inference.megatron:MegatronLocal.launch",
        reason="builds Megatron's inference engine around the trained model or a second one",
        remove_when="rl_utils takes the class of its inference interface from an argument",
        build=with_rollouts,
        since=SINCE,
    ),
)
