"""Publishes a trainer's weights to a server without workers, so that all its state is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any
from unittest import mock

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.publisher import WeightPublisher
from tests.hybrid_engine.serving.test_sides import NoWorkers


def calls_while_published(
    trainer: Any, tensors: Iterable[str], job: Job, calls: Mapping[str, Callable[[], object]]
) -> list[str]:
    """Return the calls that raise no StateError while `tensors` are published. Collective."""
    with mock.patch.object(type(trainer), "unserved", tuple(tensors)):
        publisher = WeightPublisher(
            trainer, [NoWorkers()], config=GenerateConfig(timeout_seconds=60), job=job
        )
        with closing(publisher):
            publisher.publish()
            allowed = [name for name, call in calls.items() if not is_refused(call)]
            publisher.withdraw()
    return allowed


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StateError:
        return True
    return False
