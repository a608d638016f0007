"""Tests whose bodies run on ranks. Their asserts hold on every rank; one that fails travels back.

    @on_ranks(2)                                            # or `on_engines(2)`, with Megatron and vLLM
    def test_ranks_agree(path: Path) -> None:
        assert Job.join(60).agreement.is_same([7], "it")

All bodies of a module on the same number of ranks run in turn, in one launch. Arguments are pickled;
they are parameters, `tmp_path`, and fixtures that have the scope of a module or of a session.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.harness.launch import Call, Outcomes

T = TypeVar("T")
Body = Callable[..., None]


@dataclass(frozen=True)
class Launch:
    """A launch that bodies of a module share.

    Attributes:
        launcher: fixture that launches, `ranks` or `engines`.
        num_ranks: number of ranks.
        timeout: seconds for all bodies together.
    """

    launcher: str
    num_ranks: int
    timeout: float

    def __call__(self, body: Body) -> Body:
        """Return the test of `body`."""

        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, bodies: Callable[[Launch], Outcomes], **_: object) -> None:
            assert bodies(self)[request.node.name]

        names = ("request", "bodies", self.launcher, *inspect.signature(body).parameters)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.launch = self  # type: ignore[attr-defined]
        return test


def on_ranks(num_ranks: int, timeout: float = 300) -> Launch:
    """Run the decorated test on ranks without engines."""
    return Launch("ranks", num_ranks, timeout)


def on_engines(num_ranks: int, timeout: float = 300) -> Launch:
    """Run the decorated test on ranks that may build engines."""
    return Launch("engines", num_ranks, timeout)


def of_all_ranks(value: T) -> list[T]:
    """Return `value` of every rank, by rank. Collective over the default group."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def launched_bodies(request: pytest.FixtureRequest) -> Callable[[Launch], Outcomes]:
    """Return a function that runs the bodies of a launch once; `request` is that of the module."""

    def arguments_of(item: pytest.Function) -> Mapping[str, Any]:
        values = {**item.callspec.params} if hasattr(item, "callspec") else {}
        for name in inspect.signature(inspect.unwrap(item.function)).parameters:
            if name == "tmp_path":
                values[name] = request.getfixturevalue("tmp_path_factory").mktemp("body")
            elif name not in values:
                values[name] = request.getfixturevalue(name)
        return values

    @functools.cache
    def launched(launch: Launch) -> Outcomes:
        calls: dict[str, Call] = {
            item.name: (_run, (item.module.__name__, item.originalname, arguments_of(item)))
            for item in request.session.items
            if item.getparent(pytest.Module) is request.node and getattr(item.function, "launch", None) == launch
        }
        launcher = request.getfixturevalue(launch.launcher)
        return launcher.launch_in_turn(launch.num_ranks, calls, launch.timeout)

    return launched


def _run(module: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Run a body on this rank."""
    inspect.unwrap(getattr(importlib.import_module(module), name))(**arguments)
    return True
