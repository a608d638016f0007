"""The benchmark of simulated hosts on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import across_hosts


@pytest.mark.ranks
@pytest.mark.slow
def test_every_variant_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    out = tmp_path / "figures.json"
    options = ["--layers", "1", "--train", "2", "--hosts", "a,b", "--repeat", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["across_hosts", *options])
    across_hosts.main()
    figures = json.loads(out.read_text())
    assert list(figures) == list(across_hosts.VARIANTS)
    assert len({(row["network"], row["host"], row["own"]) for row in figures.values()}) == 1, "two ranks need no relay"
    assert all(row["network"] > 0 for row in figures.values())
