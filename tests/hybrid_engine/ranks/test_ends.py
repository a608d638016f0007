"""Errors while a rank ends do not hide the error that caused the end."""

from __future__ import annotations

import pytest

from hybrid_engine.ranks.signals_and_forks import Ends


def fail() -> None:
    raise OSError("while it ended")


def test_an_error_while_ending_keeps_the_error_being_handled() -> None:
    """contextlib.ExitStack.close drops the exception that is being handled."""
    inner = Ends()
    ends = Ends()
    inner.callback(fail)
    ends.callback(inner.close)
    ends.callback(fail)
    with pytest.raises(OSError, match="while it ended") as raised:
        try:
            raise KeyError("why")
        finally:
            ends.close()
    second = raised.value.__context__
    assert isinstance(second, OSError), "the other callback's error"
    assert isinstance(second.__context__, KeyError), "the error being handled"
    assert second.__context__.__context__ is None


def test_an_error_while_ending_alone_has_no_context() -> None:
    ends = Ends()
    ends.callback(fail)
    with pytest.raises(OSError, match="while it ended") as raised:
        ends.close()
    assert raised.value.__context__ is None
