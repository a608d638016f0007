"""The gate: no token is drawn while a worker's weights are incomplete. It runs in the engine core.

All calls of workers go through the engine core. A worker that computed with incomplete weights
would answer nonsense, and one that raised would end vLLM's engine. So a server that gets its
weights from trainers is paused before it is up, and requests wait. Resuming it is refused until all
workers have the weights of one version. All tokens go through vLLM's scheduler, and only
`resume_scheduler` opens it: `wake_up` calls it as well. A pause that waits for running requests
does not close the scheduler before they have ended, so weights change only while the scheduler runs
no request.

vLLM's routes call workers by name through `collective_rpc`. Calls that bring weights always pass.
Other calls pass once the weights are complete, if they are known not to change weights, or if they
are functions of a program that has the engine in its own process. A worker's error is returned as
an answer: otherwise vLLM would stop reading at the first error, and take the answers of other
workers for those of the next call.

A request that asks for weights of a job and version is answered with these weights, or refused:

    arrives         refused if the server has another job, or draws tokens with another version
    waits, runs     refused, with its tokens so far, if the server joins another job, or is resumed
                    with another version

Every token is drawn between a resume and the next pause, so a request for a version gets no token
of another version. A request that names no job and no version is answered with any weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.private_names import Function
from hybrid_engine.errors import HybridEngineError, StateError, clipped, first_of
from hybrid_engine.serving.invitation import JOB, NO_VERSION, VERSION

_BRING_WEIGHTS = frozenset(
    {
        *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
        *("finish_weight_update", "shutdown_weight_transfer_engine"),
    }
)
_READ_WEIGHTS = frozenset({"compute_weight_checksums", "get_model_inspection"})
_BAN_TOKENS = "monkey_patch_model"
"""Method of verl's workers, which keeps vLLM from drawing ids that the tokenizer does not have.

It is left out: vLLM draws from the distribution that the trainer computes, and is compared with.
"""
_TRAINERS_OWN_MEMORY = (
    "weights of this server, and their memory, come and go with its trainers' switches: pause the "
    "server, or sleep at level 0"
)


def close_gate(load_format: str) -> None:
    """Make engine cores of this process that use `load_format` start paused, without weights."""
    core = internals.ENGINE_CORE
    wrappers: dict[str, Function] = {
        # The constructor calls this when workers exist and the scheduler does not.
        "_initialize_kv_caches": _begin,
        "collective_rpc": _call_workers,
        "resume_scheduler": _resume,
        "set_weight_version": _label,
        "sleep": _sleep,
        "release_kv_cache_memory": _refuse,
        "add_lora": _with_weights,
        "add_request": _add_request,
    }
    for name, wrapper in wrappers.items():
        original = getattr(core, name, None)
        if original is not None:  # some versions lack some of them, see internals.ASKED_FOR
            setattr(core, name, _wrapped(original, wrapper, load_format))
    logging.getLogger(core.__module__).addFilter(_in_one_line)


def _wrapped(original: Function, wrapper: Function, load_format: str) -> Function:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.vllm_config.load_config.load_format != load_format:
            return original(self, *args, **kwargs)
        return wrapper(partial(original, self), self, *args, **kwargs)

    return method


def _begin(initialize: Callable[[Any], Any], core: Any, vllm_config: Any) -> Any:
    from hybrid_engine.backends.vllm.server import receiver

    caches = initialize(vllm_config)
    core._weight_version = NO_VERSION
    core._job = ""
    core._weights_job = ""
    core.model_executor.collective_rpc(receiver.begin)
    core._begins_without_weights = True
    # The scheduler does not exist yet; its constructor will pause it.
    config = vllm_config.scheduler_config
    scheduler_class = config.get_scheduler_cls()
    config.get_scheduler_cls = lambda: partial(_paused, scheduler_class)
    return caches


def _paused(scheduler_class: Function, *args: Any, **kwargs: Any) -> Any:
    scheduler = scheduler_class(*args, **kwargs)
    scheduler.set_pause_state(internals.PAUSED)
    return scheduler


def _call_workers(
    call: Callable[..., list[Any]],
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    from hybrid_engine.backends.vllm.server import probing
    from hybrid_engine.backends.vllm.server.receiver import answer

    if not hasattr(core, "_begins_without_weights"):
        # vLLM's own call during the core's construction.
        return call(method, timeout, args, kwargs)
    if method == _BAN_TOKENS:
        return []
    if method == "hybrid_engine_describe":
        return [probing.describe(core)]
    if method == "hybrid_engine_probe":
        _require_rest(core)
        _require_weights(core, "there is nothing to compare", also_uncompared=True)
        return [probing.probe(core, *args)]
    if method == "update_weights":
        _require_rest(core)
        # Requests may have run since the trainers paused the server.
        core._reset_caches()
    if method not in _BRING_WEIGHTS:
        # A request over HTTP cannot carry a function, so these come from the engine's own program.
        is_apply_model = method == "apply_model" and bool(args) and callable(args[0])
        is_function = callable(method) or is_apply_model
        if not is_function and method not in _READ_WEIGHTS:
            raise StateError(
                f"{clipped(str(method))} is refused: {_TRAINERS_OWN_MEMORY}", code="call-refused"
            )
        _require_weights(core, f"{method} is refused")
    answers = call(answer, timeout, (method, args, kwargs or {}))
    failures = [f"worker {number}: {error}" for number, (error, _) in enumerate(answers) if error]
    if failures:
        raise StateError(clipped("\n".join(failures), 4000), code="worker-failed")
    if method == "init_weight_transfer_engine":
        core._job = (kwargs or {})["init_info"].get("job", "")
        _refuse_others(core, None)
    return [result for _, result in answers]


def _resume(resume: Callable[[], None], core: Any) -> None:
    job, version = _require_weights(core, "the server stays paused, and requests wait")
    core._weights_job = job
    core._weight_version = version
    _refuse_others(core, version)
    resume()


def _add_request(
    add: Callable[..., None],
    core: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    version = None if core.is_scheduler_paused() else core._weight_version
    reason = _refusal(core, request, version)
    if reason:
        _abort(core, [(request, reason)])
    else:
        add(request, *args, **kwargs)


def _refuse_others(core: Any, version: str | None) -> None:
    """Refuse the requests that ask for other weights than those of `version`."""
    refused = []
    for request in core.scheduler.requests.values():
        reason = _refusal(core, request, version)
        if reason and not request.is_finished():
            refused.append((request, reason))
    _abort(core, refused)


def _refusal(core: Any, request: Any, version: str | None) -> str:
    """Return the reason for refusing a request; "" if it is accepted.

    `version`: version of the weights that tokens are drawn with; None while the server is paused.
    """
    wanted = getattr(request.sampling_params, "extra_args", None) or {}
    if JOB not in wanted and VERSION not in wanted:
        return ""
    job = wanted.get(JOB)
    if job != core._job:
        return (
            f"the server belongs to job {core._job or 'none'}, and the request asks for job {job}"
        )
    if version is None:
        return ""
    # The server may have joined the job already while its weights are those of another one.
    wanted_version = wanted.get(VERSION, version)
    if (core._weights_job, version) != (core._job, wanted_version):
        return (
            f"the server has version {version} of job {core._weights_job}, and the request asks "
            f"for version {wanted_version}"
        )
    return ""


def _abort(core: Any, refused: Sequence[tuple[Any, str]]) -> None:
    """Abort requests, and send their clients the reason."""
    kinds = internals.ENGINE_MESSAGES
    for request, reason in refused:
        core.abort_requests([request.request_id])
        if not hasattr(core, "output_queue"):
            # The core of an `LLM`, which adds its requests in the same process.
            raise StateError(reason, code="request-refused")
        output = kinds.EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=kinds.FinishReason.ABORT,
            stop_reason=reason,
        )
        outputs = kinds.EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
        core.output_queue.put_nowait((request.client_index, outputs))


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log a refusal of this package in one line, without vLLM's traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HybridEngineError):
        text = " ".join(str(error).split())
        record.args = (record.getMessage(), clipped(text, 500))
        record.msg = "%s: refused: %s"
        record.exc_info = None
        record.exc_text = None
        record.levelno = logging.WARNING
        record.levelname = "WARNING"
    return True


def _label(label: Callable[[str], None], core: Any, version: str) -> None:
    """Set the version in the server's answers, if tokens are drawn with that version's weights."""
    if version == NO_VERSION:
        _require_rest(core)
    else:
        _, present = _require_weights(core, f"version {version!r} is refused")
        if version != present:
            raise StateError(
                f"version {version!r} is refused: the weights are of version {present}",
                code="wrong-version",
            )
    label(version)


def _require_rest(core: Any) -> None:
    """Raise StateError unless no request runs, or can run before the server is resumed."""
    if not core.is_scheduler_paused() or core.scheduler.running or core.batch_queue:
        raise StateError(
            "the server is generating: it was resumed while its trainers had paused it",
            code="server-is-generating",
        )


def _sleep(sleep: Function, core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level:
        raise StateError(_TRAINERS_OWN_MEMORY, code="call-refused")
    return sleep(level, *args, **kwargs)


def _refuse(original: Function, core: Any, *args: Any, **kwargs: Any) -> Any:
    raise StateError(_TRAINERS_OWN_MEMORY, code="call-refused")


def _with_weights(original: Function, core: Any, *args: Any, **kwargs: Any) -> Any:
    name = original.func.__name__  # type: ignore[attr-defined]
    _require_weights(core, f"{name} is refused")
    return original(*args, **kwargs)


def _require_weights(core: Any, consequence: str, also_uncompared: bool = False) -> tuple[str, str]:
    """Return the job and version of the weights, the same in all workers.

    Raises StateError, beginning with `consequence`, if the weights are incomplete, or if the
    trainers have not compared log-probabilities yet and `also_uncompared` is false.
    """
    from hybrid_engine.backends.vllm.server.receiver import weights_of

    answers = core.model_executor.collective_rpc(weights_of, args=(also_uncompared,))
    obstacles = [obstacle for obstacle, _, _ in answers if obstacle]
    owners = {(job, version) for _, job, version in answers}
    if not obstacles and len(owners) > 1:
        versions = sorted(version for _, version in owners)
        obstacles = [f"workers have weights of versions {versions}"]
    if obstacles:
        raise StateError(f"{consequence}: {first_of(obstacles, 4)}", code="weights-incomplete")
    ((job, version),) = owners
    return job, str(version)
