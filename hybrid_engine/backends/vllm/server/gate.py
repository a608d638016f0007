"""No token is drawn while a worker's weights are not whole: in the engine core, through which all calls of workers go.

A worker that computed with what is no model would answer nonsense, and one that raised would end vLLM's engine. So a
server that gets its weights from trainers is paused before it is up; requests wait. Whoever resumes it is refused until
all workers have the weights of one version. vLLM's scheduler is the one place through which all tokens go, and
`resume_scheduler` the one way to open it: `wake_up` calls it too. A pause that waits for running requests does not
close it before they have ended, so weights change only under a scheduler that runs none.

What vLLM's routes have workers do goes through `collective_rpc`, by name. What brings weights goes through it always,
and of the rest what is known to leave them as they are, once they are whole; functions of a program that has the engine
in its own process go through then, too. A worker's error is an answer like any other there: vLLM would stop reading at
the first, and take what other workers answered for that of the next call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import HybridEngineError, StateError, clipped, first_of

_BRING_WEIGHTS = frozenset(
    {
        *("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),
        "shutdown_weight_transfer_engine",
    }
)
_READ_WEIGHTS = frozenset({"compute_weight_checksums", "get_model_inspection"})
_WHY_THE_TRAINERS = (
    "weights of this server, and their memory, go and come with its trainers' switches: pause the server, or sleep at "
    "level 0"
)


def close_gate(load_format: str) -> None:
    """Have every engine core of this process that gets its weights by `load_format` begin paused, and stay so without
    weights.

    Also one that is being made: where vLLM spawns its processes, the constructor loads plugins. How log-probabilities
    are computed is in vLLM's configuration, which its first process makes once it has loaded them.
    """
    from vllm import EngineArgs

    EngineArgs.create_engine_config = _configured(EngineArgs.create_engine_config, load_format)
    core = internals.ENGINE_CORE.load()
    wrappers: dict[str, Callable[..., Any]] = {
        "_initialize_kv_caches": _begin,  # called by the constructor, once there are workers, before a scheduler
        "collective_rpc": _call_workers,
        "resume_scheduler": _resume,
        "set_weight_version": _label,
        "sleep": _sleep,
        "release_kv_cache_memory": _refuse,
        "add_lora": _with_weights,
        "add_request": _add_request,
    }
    for name, wrapper in wrappers.items():
        if (original := getattr(core, name, None)) is not None:  # see internals.ASKED_FOR
            setattr(core, name, _wrapped(original, wrapper, load_format))
    logging.getLogger(core.__module__).addFilter(_in_one_line)


def refuse_servers(load_format: str, lacking: Sequence[str]) -> None:
    """Have every engine that would get its weights by `load_format` end before it is built, for this vLLM lacks what
    its servers need; other engines are as ever."""
    from vllm import EngineArgs

    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.load_format == load_format:
            internals.refuse_lacking(lacking)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any], load_format: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.vllm_config.load_config.load_format != load_format:
            return original(self, *args, **kwargs)
        return wrapper(functools.partial(original, self), self, *args, **kwargs)

    return method


def _configured(create: Callable[..., Any], load_format: str) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from hybrid_engine.backends.vllm.requests import LOGPROBS_MODE
        from hybrid_engine.backends.vllm.server import queues, routes

        config = create(self, *args, **kwargs)
        if config.load_config.load_format == load_format:
            routes.guard_routes()
            queues.unname_queues()
            config.model_config.logprobs_mode = LOGPROBS_MODE  # as vLLM in the trainers' processes has it
        return config

    return create_engine_config


def _begin(go_on: Callable[[Any], Any], core: Any, vllm_config: Any) -> Any:
    from hybrid_engine.backends.vllm.server import ownership, receiver
    from hybrid_engine.serving.invitation import NO_VERSION

    found = go_on(vllm_config)
    core._weight_version = NO_VERSION
    ownership.begin(core)
    core.model_executor.collective_rpc(receiver.begin)
    core._begins_without_weights = True
    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    vllm_config.scheduler_config.get_scheduler_cls = lambda: functools.partial(_paused, scheduler_class)
    return found


def _paused(scheduler_class: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scheduler = scheduler_class(*args, **kwargs)
    scheduler.set_pause_state(internals.PAUSED.load())
    return scheduler


def _call_workers(
    call: Callable[..., list[Any]],
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    from hybrid_engine.backends.vllm.server import ownership, probing
    from hybrid_engine.backends.vllm.server.receiver import answer

    if not hasattr(core, "_begins_without_weights"):  # vLLM's own, while the core begins
        return call(method, timeout, args, kwargs)
    if method == "hybrid_engine_describe":
        return [probing.describe(core)]
    if method == "hybrid_engine_probe":
        _require_rest(core)
        _require_weights(core, "there is nothing to compare", also_uncompared=True)
        return [probing.probe(core, *args)]
    if method == "update_weights":
        _require_rest(core)
        core._reset_caches()  # of whatever ran since the trainers paused it
    if method not in _BRING_WEIGHTS:
        # a request over HTTP carries no function, so `LLM.apply_model` is a call of the program with the engine
        is_of_the_program = callable(method) or (method == "apply_model" and bool(args) and callable(args[0]))
        if not is_of_the_program and method not in _READ_WEIGHTS:
            raise StateError(f"{clipped(str(method))} is refused: {_WHY_THE_TRAINERS}")
        _require_weights(core, f"{method} is refused")
    answers = call(answer, timeout, (method, args, kwargs or {}))
    if failures := [f"worker {number}: {why}" for number, (why, _) in enumerate(answers) if why]:
        raise StateError(clipped("\n".join(failures), 4000))
    if method == "init_weight_transfer_engine":
        ownership.joined(core, (kwargs or {})["init_info"].get("job", ""))
    return [found for _, found in answers]


def _resume(resume: Callable[[], None], core: Any) -> None:
    from hybrid_engine.backends.vllm.server import ownership

    job, version = _require_weights(core, "the server stays paused, and requests wait")
    ownership.resumes(core, job, version)
    resume()


def _add_request(add: Callable[..., None], core: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    from hybrid_engine.backends.vllm.server import ownership

    ownership.add_request(add, core, request, *args, **kwargs)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log a refusal of this package without vLLM's traceback to where it was raised."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HybridEngineError):
        text = " ".join(str(error).split())
        record.msg, record.args = "%s: refused: %s", (record.getMessage(), clipped(text, 500))
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def _label(label: Callable[[str], None], core: Any, version: str) -> None:
    """A server that draws tokens says by which weights, whoever calls."""
    from hybrid_engine.serving.invitation import NO_VERSION

    if version == NO_VERSION:
        _require_rest(core)
    elif version != (own := _require_weights(core, f"version {version!r} is refused")[1]):
        raise StateError(f"version {version!r} is refused: the weights are of version {own}")
    label(version)


def _require_rest(core: Any) -> None:
    """Raise StateError unless no request runs, nor will before somebody resumes the server."""
    if not core.is_scheduler_paused() or core.scheduler.running or core.batch_queue:
        raise StateError("the server draws tokens: somebody has resumed it after its trainers paused it")


def _sleep(sleep: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level:
        raise StateError(_WHY_THE_TRAINERS)
    return sleep(level, *args, **kwargs)


def _refuse(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    raise StateError(_WHY_THE_TRAINERS)


def _with_weights(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _require_weights(core, f"{original.func.__name__} is refused")  # type: ignore[attr-defined]
    return original(*args, **kwargs)


def _require_weights(core: Any, what: str, also_uncompared: bool = False) -> tuple[str, str]:
    """Return the job and version of the weights, the same in all workers.

    Raises StateError, which begins with `what`, where they are not whole, or where trainers have yet to compare what is
    computed with them, unless `also_uncompared`.
    """
    from hybrid_engine.backends.vllm.server.receiver import weights_of

    answers = core.model_executor.collective_rpc(weights_of, args=(also_uncompared,))
    why = [obstacle for obstacle, _, _ in answers if obstacle]
    versions = {(job, version) for _, job, version in answers}
    if not why and len(versions) > 1:
        why = [f"workers have weights of versions {sorted(version for _, version in versions)}"]
    if why:
        raise StateError(f"{what}: {first_of(why, 4)}")
    ((job, version),) = versions
    return job, str(version)
