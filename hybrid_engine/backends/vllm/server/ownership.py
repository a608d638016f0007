"""Requests that ask for weights of a job and version: answered with these weights, or refused.

    arrives         refused if the server has another job, or draws tokens with another version
    waits, runs     refused, with its tokens so far, if the server joins another job, or is resumed
                    with another version

Weights change only while no request runs, and every token is drawn between a resume and the next
pause, so a request for a version gets no token of another version. A request that names no job and
no version is answered with any weights. All of this runs in the engine core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import StateError
from hybrid_engine.serving.invitation import JOB, VERSION


def begin(core: Any) -> None:
    """Initialise a server without a job and without weights."""
    core._job = ""
    core._weights_job = ""


def add_request(
    add: Callable[..., None], core: Any, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Add a request to the engine core, or refuse it."""
    version = None if core.is_scheduler_paused() else core._weight_version
    reason = _refusal(core, request, version)
    if reason:
        _refuse(core, [(request, reason)])
    else:
        add(request, *args, **kwargs)


def joined(core: Any, job: str) -> None:
    """Assign the server to a job, and refuse requests for other jobs."""
    core._job = job
    _refuse_all(core, None)


def resumes(core: Any, job: str, version: str) -> None:
    """Record the weights of the tokens drawn from now on, and refuse requests for other weights."""
    core._weights_job = job
    core._weight_version = version
    _refuse_all(core, version)


def _refuse_all(core: Any, version: str | None) -> None:
    refused = []
    for request in core.scheduler.requests.values():
        reason = _refusal(core, request, version)
        if reason and not request.is_finished():
            refused.append((request, reason))
    _refuse(core, refused)


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


def _refuse(core: Any, refused: Sequence[tuple[Any, str]]) -> None:
    """Abort requests, and send their clients the reason."""
    kinds = internals.ENGINE_MESSAGES.load()
    for request, reason in refused:
        core.abort_requests([request.request_id])
        if not hasattr(core, "output_queue"):
            # The core of an `LLM`, which adds its requests in the same process.
            raise StateError(reason, code="request-refused")
        output = kinds.EngineCoreOutput(
            request.request_id, [], finish_reason=kinds.FinishReason.ABORT, stop_reason=reason
        )
        outputs = kinds.EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
        core.output_queue.put_nowait((request.client_index, outputs))
