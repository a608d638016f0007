"""A trainer that publishes its weights to a server without workers, so that all of its state leaves the device."""

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


def let_through(trainer: Any, tensors: Iterable[str], job: Job, calls: Mapping[str, Callable[[], object]]) -> list[str]:
    """Those of these calls that raise no StateError while the weights, these tensors, are published. Collective."""
    with mock.patch.object(type(trainer), "unserved", tuple(tensors)):
        publisher = WeightPublisher(trainer, [NoWorkers()], config=GenerateConfig(timeout_seconds=60), job=job)
        with closing(publisher):
            publisher.publish()
            passed = [name for name, call in calls.items() if not is_refused(call)]
            publisher.withdraw()
    return passed


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StateError:
        return True
    return False
