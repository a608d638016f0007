"""All that runs on so many ranks runs in one launch: to import and build costs more than most of what is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.launch import Ranks, remembered
from tests.hybrid_engine.end_to_end import test_failures, test_hosts, test_training
from tests.zoo import workers

Outcomes = Callable[[int], dict[str, list[Any]]]


@pytest.fixture(scope="package")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Number of ranks -> by name, what everything that runs on so many ranks brought back; launched once."""
    directory = tmp_path_factory.mktemp("end to end")
    model = workers.write_model(directory / "model", "qwen3")

    @remembered
    def launched(num_ranks: int) -> dict[str, list[Any]]:
        calls: dict[str, Any] = {}
        if num_ranks == 2:  # what makes and ends a process group of its own comes before what finds one
            calls["versions"] = (test_failures.refuse_versions, (model,))
            calls["half built"] = (test_failures.fail_while_building, (model,))
            calls["failures"] = (test_failures.fail_and_go_on, (model,))
            calls["gathers"] = (test_training.follow_overlapped_gathers, (model, directory / "checkpoint"))
        else:
            calls["two hosts"] = (test_hosts.switch_on_hosts, (model, ("a", "a", "b", "b")))
            calls["one host"] = (test_hosts.switch_on_hosts, (model, ("a", "a", "a", "a")))
        for name, (wanted, actor) in test_training.ACTORS.items():
            if wanted == num_ranks:
                calls[f"{name}, switched"] = (test_training.train_with_switches, (model, actor))
                calls[f"{name}, without"] = (test_training.train_without, (model, actor))
        return engines.launch_in_turn(num_ranks, calls, timeout=800)

    return launched
