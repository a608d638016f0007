"""How far reading has come: lines of the log, a bar on a terminal, nothing on other ranks."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from hybrid_engine.backends.huggingface import progress as progress_module
from hybrid_engine.backends.huggingface.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read(is_shown: bool = True) -> None:
    with progress("reading model", 4_000_000_000, is_shown=is_shown) as advance:
        for _ in range(2):
            advance(1_500_000_000)


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "hybrid_engine")
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", -1.0)
    read()
    first, *between, last = caplog.messages
    assert first == "reading model: 4.0 GB on this rank"
    assert between == ["reading model: 1.5 of 4.0 GB", "reading model: 3.0 of 4.0 GB"]
    assert last.startswith("reading model: done in ")


def test_a_bar_on_a_terminal_that_goes_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hybrid_engine")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    read()
    assert "3.0/4.0 GB" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")
    assert caplog.messages == []


def test_nothing_on_other_ranks(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO, "hybrid_engine")
    read(is_shown=False)
    assert (caplog.messages, capsys.readouterr().err) == ([], "")
