"""The ratchet of sizes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import readability


def test_a_room_may_grow_only_if_others_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps({"sums": {"tests": {"nodes": 10}}, "rooms": {}}))
    monkeypatch.setattr(readability, "RECORDED", recorded)

    def lint(first: int, second: int, *options: str) -> None:
        rooms = {"tests/first": Counter(nodes=first), "tests/second": Counter(nodes=second)}
        monkeypatch.setattr(readability, "measured", lambda: (rooms, []))
        monkeypatch.setattr(sys, "argv", ["readability", *options])
        readability.main()

    lint(3, 5, "--record")
    lint(3, 5)
    lint(2, 5)
    for options in ((), ("--record",)):
        with pytest.raises(SystemExit, match="tests: nodes is 9, recorded 8"):
            lint(4, 5, *options)
    with pytest.raises(SystemExit, match="tests/first: nodes is 4, recorded 3"):
        lint(4, 4)
    lint(4, 4, "--record")
    lint(4, 4)
