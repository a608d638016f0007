"""Checks of errors by type, key and code.

    with refused(StateError, "worker-is-closed"):
        worker.update_actor(batch)
    with violated(ConfigError, ("actor.lr", "out-of-range")):
        load_config(settings)

Messages are for people, so tests do not compare sentences. A test may look for a number or a name
that a message must carry, as in ``refused(StateError, "too-few-ranks", "8")``; where
`pytest.raises` has further arguments, `has_code` and `has_violations` are its `check`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from hybrid_engine.errors import HybridEngineError, RemoteError, Violation


def has_code(code: str, *values: str) -> Callable[[BaseException], bool]:
    """Return a check that an error has `code` and that its message contains each of `values`."""

    def check(error: BaseException) -> bool:
        assert isinstance(error, HybridEngineError)
        assert error.code == code, f"code is {error.code!r}, expected {code!r}: {error}"
        missing = [value for value in values if value not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return True

    return check


def refused(
    kind: type[HybridEngineError], code: str, *values: str
) -> AbstractContextManager[pytest.ExceptionInfo[HybridEngineError]]:
    """Expect an error of `kind` in the block, with `code` and each of `values` in its message."""
    return pytest.raises(kind, check=has_code(code, *values))


def violated(
    kind: type[HybridEngineError], *expected: tuple[str, str]
) -> AbstractContextManager[pytest.ExceptionInfo[HybridEngineError]]:
    """Expect an error of `kind` in the block that lists exactly the violations `expected`, as (key,
    code).
    """
    return pytest.raises(kind, check=has_violations(*expected))


def violations_of(error: BaseException) -> list[tuple[str, str]]:
    """Return (key, code) of each violation that `error` lists, in its order."""
    return [
        (item.key, item.code)
        for item in getattr(error, "findings", ())
        if isinstance(item, Violation)
    ]


def has_violations(
    *expected: tuple[str, str], exactly: bool = True
) -> Callable[[BaseException], bool]:
    """Return a check that an error lists the violations `expected`, given as (key, code).

    With `exactly` it lists no others. The order does not matter.
    """

    def check(error: BaseException) -> bool:
        listed = violations_of(error)
        missing = [pair for pair in expected if pair not in listed]
        assert not missing, f"missing {missing}, listed {listed}: {error}"
        if exactly:
            assert sorted(listed) == sorted(expected), f"listed {listed}: {error}"
        return True

    return check


def has_violation(key: str, code: str, *values: str) -> Callable[[BaseException], bool]:
    """Return a check that an error lists only this violation and contains each of `values`."""

    def check(error: BaseException) -> bool:
        assert violations_of(error) == [(key, code)], str(error)
        missing = [value for value in values if value not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return True

    return check


@contextmanager
def failing(
    kind: type[HybridEngineError], code: str = "", pattern: str = "", *, on: int | None = None
) -> Iterator[None]:
    """Assert on a rank that the block raises `kind`; every rank runs it.

    Args:
        kind: exact type of the error.
        code: its code, or that of its violations.
        pattern: regular expression for a part of the message on every rank.
        on: the only rank that raises `kind`, others a RemoteError; None: every rank raises it.
    """
    with pytest.raises(HybridEngineError) as caught:
        yield
    error = caught.value
    if on in (None, int(os.environ["RANK"])):
        assert type(error) is kind, repr(error)
        codes = [error.code, *(code for _, code in violations_of(error))]
        assert code in codes, f"codes are {codes}, expected {code!r}: {error}"
    else:
        assert type(error) is RemoteError, repr(error)
    assert re.search(pattern, str(error), re.DOTALL), str(error)
