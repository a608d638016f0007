"""No token is drawn while a worker's weights are not whole: in the engine core, where requests are scheduled.

A worker that computed with what is no model would answer nonsense, and one that raised would end vLLM's engine. So a
server that gets its weights from trainers is paused before it is up; requests wait. Whoever resumes it is refused until
all workers have their weights. vLLM's scheduler is the one place through which all tokens go, and `resume_scheduler`
the one way to open it: `wake_up` calls it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import StateError, first_of

NO_VERSION = "none"
"""Version of weights that are not there."""


def close_gate(load_format: str) -> None:
    """Have every engine core of this process that gets its weights by `load_format` begin paused, and stay so without
    weights."""
    core = internals.ENGINE_CORE.load()
    core.__init__ = _begins_paused(core.__init__, load_format)
    core.resume_scheduler = _needs_weights(core.resume_scheduler, load_format)
    core.sleep = _is_the_trainers(core.sleep, load_format)


def _begins_paused(begin: Callable[..., None], load_format: str) -> Callable[..., None]:
    @functools.wraps(begin)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.vllm_config.load_config.load_format == load_format:
            self.scheduler.set_pause_state(internals.PAUSED.load())
            self._weight_version = NO_VERSION
            from hybrid_engine.backends.vllm.server import receiver

            self.collective_rpc(receiver.begin)

    return wrapped


def _is_the_trainers(sleep: Callable[..., Any], load_format: str) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def wrapped(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level and self.vllm_config.load_config.load_format == load_format:
            raise StateError(
                "memory of this server's weights goes and comes with its trainers' switches, and sleeps already while "
                "they train: pause the server, or sleep at level 0"
            )
        return sleep(self, level, *args, **kwargs)

    return wrapped


def _needs_weights(resume: Callable[[Any], None], load_format: str) -> Callable[[Any], None]:
    @functools.wraps(resume)
    def wrapped(self: Any) -> None:
        if self.vllm_config.load_config.load_format == load_format:
            from hybrid_engine.backends.vllm.server.receiver import obstacle

            if obstacles := [why for why in self.collective_rpc(obstacle) if why]:
                raise StateError(f"the server stays paused, and requests wait: {first_of(obstacles, 4)}")
        resume(self)

    return wrapped
