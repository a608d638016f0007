"""Causes of a tensor's difference from a cold load, derived from its bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hybrid_engine.tools.cli.verify_command import _as_json
from hybrid_engine.tools.verify.certificate import (
    Cause,
    EngineSnapshot,
    Finding,
    StateDifference,
    compare,
    difference_of_tensor,
)

NAN = math.nan
WEIGHT = "a._parameters.weight"
BUFFER = "a._buffers.scale"
PACKED = "a.kernel.<handle>"
PLACES = {"head._parameters.weight": "0", "embedding._parameters.weight": "0"}


@pytest.mark.parametrize(
    ("path", "cold", "before", "after", "cause"),
    [
        (WEIGHT, [1, 2, 3], [4, 5, 6], [1, 2, 3], None),
        (WEIGHT, [1, NAN], [4, 5], [1, NAN], None),
        (WEIGHT, [1, 2, 3], [4, 5, 6], [4, 5, 6], Cause.STALE),
        (WEIGHT, [1, 2, 3], [4, 5, 6], [1, 5, 3], Cause.STALE),
        (WEIGHT, [1, 2, 0], [4, 5, 0], [4, 5, 0], Cause.STALE),
        (PACKED, [1, 2, 3], [4, 5, 6], [4, 5, 6], Cause.UNDERIVED),
        (BUFFER, [1, 2, 3], [4, 5, 6], [4, 5, 6], Cause.UNDERIVED),
        (WEIGHT, [1, 2, 0], [4, 5, 0], [1, 2, 7], Cause.PADDING),
        (WEIGHT, [1, 2, 0], [4, 5, 0], [1, 2, NAN], Cause.PADDING),
        (BUFFER, [1, 2, 3], [1, 2, 3], [7, 7, 7], Cause.LOST),
        (WEIGHT, [1, 2, 3], [4, 5, 6], [3, 1, 2], Cause.UNPACKED),
        (WEIGHT, [1, 2, 3], [4, 5, 6], [1, 2, 7], Cause.CORRUPT),
        (WEIGHT, [1, 2, 0], [4, 5, 0], [4, 5, 7], Cause.CORRUPT),
        (WEIGHT, [0.0], [1], [-0.0], Cause.CORRUPT),
        (WEIGHT, [1, 2, 3], None, [7, 8, 9], Cause.CORRUPT),
        (WEIGHT, [1, 2, 3], [1, 2], [1, 2], Cause.FORM),
        (WEIGHT, [1, 2], [1, 2], None, Cause.FORM),
        (WEIGHT, None, None, [1, 2], Cause.FORM),
    ],
)
def test_causes(
    path: str,
    cold: list[float] | None,
    before: list[float] | None,
    after: list[float] | None,
    cause: Cause | None,
) -> None:
    tensors = [
        None if values is None else torch.tensor(values, dtype=torch.float32)
        for values in (cold, before, after)
    ]
    difference = difference_of_tensor(path, *tensors)
    assert (difference and difference.cause) == cause


def test_the_size_of_a_difference() -> None:
    cold = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for last, size in ((4.25, 0.5), (NAN, math.inf), (math.inf, math.inf)):
        after = torch.tensor([1.0, 2.5, 3.0, last])
        difference = difference_of_tensor(WEIGHT, cold, cold + 1, after)
        assert difference == StateDifference("a.weight", Cause.CORRUPT, size, 0.5)
        # Also as JSON, which has no infinity.
        finding = Finding("reload", "differs", logprobs=size, differences=[difference])
        json.dumps(_as_json({"": [finding]}), allow_nan=False)


def snapshot(
    values: Mapping[str, float], places: Mapping[str, str] = PLACES, logprobs: float = -1.0
) -> EngineSnapshot:
    """Build a snapshot of tensors with four equal elements each."""
    return EngineSnapshot(
        {path: torch.full((4,), value) for path, value in values.items()},
        places,
        torch.tensor([logprobs]),
    )


def test_tied_tensors_count_as_one() -> None:
    cold, before = (snapshot(dict.fromkeys(PLACES, value)) for value in (1.0, 2.0))
    assert compare("reload", cold, before, cold).num_tensors == 1
    stale = compare("reload", cold, before, snapshot(dict.fromkeys(PLACES, 2.0)))
    assert [(difference.name, difference.cause) for difference in stale.differences] == [
        ("embedding.weight", Cause.STALE)
    ]
    apart = snapshot(
        {"head._parameters.weight": 2.0, "embedding._parameters.weight": 1.0},
        {path: path for path in PLACES},
    )
    untied = compare("reload", cold, before, apart)
    assert [(difference.name, difference.cause) for difference in untied.differences] == [
        ("head.weight", Cause.UNTIED)
    ]
    assert untied.status == "differs"


def test_unexplained_log_probabilities_are_untracked() -> None:
    cold, before = (snapshot(dict.fromkeys(PLACES, value)) for value in (1.0, 2.0))
    finding = compare("reload", cold, before, snapshot(dict.fromkeys(PLACES, 1.0), logprobs=-1.5))
    assert finding.differences == [StateDifference("log-probabilities", Cause.UNTRACKED, 0.5, 1.0)]
    assert finding.status == "differs"
    assert compare("reload", cold, before, cold).status == "equal"


def test_tensors_of_ranks_are_distinct(tmp_path: Path) -> None:
    for rank in range(2):
        contents = {"tensors": {WEIGHT: torch.ones(1)}, "places": {WEIGHT: "7"}, "unseen": [PACKED]}
        torch.save(contents, tmp_path / f"rank{rank}.pt")
    torch.save(torch.zeros(2, 3), tmp_path / "logprobs.pt")
    snapshot = EngineSnapshot.read(tmp_path)
    assert sorted(snapshot.tensors) == [f"rank0 {WEIGHT}", f"rank1 {WEIGHT}"]
    assert len({*snapshot.places.values()}) == 2
    assert snapshot.unseen == [f"rank0 {PACKED}", f"rank1 {PACKED}"]
