"""What a rank has built ends, and errors of the end do not hide why."""

from __future__ import annotations

import pytest

from hybrid_engine.ranks.signals_and_forks import Ends


def fail() -> None:
    raise OSError("while it ended")


def test_an_error_of_the_end_names_the_one_that_led_to_it() -> None:
    """contextlib.ExitStack.close drops the exception that is being handled."""
    inner, ends = Ends(), Ends()
    inner.callback(fail)
    ends.callback(inner.close)
    ends.callback(fail)
    with pytest.raises(OSError, match="while it ended") as raised:
        try:
            raise KeyError("why")
        finally:
            ends.close()
    second = raised.value.__context__
    assert isinstance(second, OSError), "the other end that failed"
    assert isinstance(second.__context__, KeyError), "what was being handled"
    assert second.__context__.__context__ is None


def test_without_one_there_is_none() -> None:
    ends = Ends()
    ends.callback(fail)
    with pytest.raises(OSError, match="while it ended") as raised:
        ends.close()
    assert raised.value.__context__ is None
