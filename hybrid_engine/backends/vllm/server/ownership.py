"""A request that asks for weights of a job and version is answered with these, or refused: in the engine core.

    arrives         another job than the server belongs to; or tokens are drawn now, with another version: refused
    waits, runs     the server joins another job, or is resumed with another version: refused, with the tokens so far

Weights change while nothing runs, and every token is drawn between a resume and the next pause, so no request of a
version gets a token of another. What asks for nothing is answered with whatever weights there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import StateError
from hybrid_engine.serving.invitation import JOB, VERSION


def begin(core: Any) -> None:
    """A server that belongs to nobody and has no weights."""
    core._job = core._weights_job = ""


def add_request(add: Callable[..., None], core: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Take a request, or refuse it."""
    version = None if core.is_scheduler_paused() else core._weight_version
    if why := _refusal(core, request, version):
        _refuse(core, [(request, why)])
    else:
        add(request, *args, **kwargs)


def joined(core: Any, job: str) -> None:
    """The server belongs to a job from now on."""
    core._job = job
    _refuse_all(core, None)


def resumes(core: Any, job: str, version: str) -> None:
    """Tokens will be drawn with these weights."""
    core._weights_job, core._weight_version = job, version
    _refuse_all(core, version)


def _refuse_all(core: Any, version: str | None) -> None:
    waiting = [(request, _refusal(core, request, version)) for request in core.scheduler.requests.values()]
    _refuse(core, [(request, why) for request, why in waiting if why and not request.is_finished()])


def _refusal(core: Any, request: Any, version: str | None) -> str:
    """Why a request is refused, empty where it is not; `version`: that tokens are drawn with, None while none are."""
    asked = getattr(request.sampling_params, "extra_args", None) or {}
    if JOB not in asked and VERSION not in asked:
        return ""
    if asked.get(JOB) != core._job:
        return f"the server belongs to job {core._job or 'none'}, and the request asks for job {asked.get(JOB)}"
    if version is None:
        return ""
    has, wanted = (core._weights_job, version), (core._job, asked.get(VERSION, version))
    if has != wanted:
        return f"the server has version {has[1]} of job {has[0]}, and the request asks for version {wanted[1]}"
    return ""


def _refuse(core: Any, refused: Sequence[tuple[Any, str]]) -> None:
    """End requests, and tell those who made them why."""
    kinds = internals.ENGINE_MESSAGES.load()
    for request, why in refused:
        core.abort_requests([request.request_id])
        if not hasattr(core, "output_queue"):  # of an `LLM`, which adds its requests in its own process
            raise StateError(why)
        output = kinds.EngineCoreOutput(request.request_id, [], finish_reason=kinds.FinishReason.ABORT, stop_reason=why)
        outputs = kinds.EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
        core.output_queue.put_nowait((request.client_index, outputs))
