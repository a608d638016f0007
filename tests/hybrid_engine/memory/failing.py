"""A method that fails once, as when out of memory."""

from __future__ import annotations

from typing import Any

import pytest


def fail(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, after: int = 0, owner: str | None = None) -> None:
    """Make one call of a method fail, after `after` successful calls.

    owner: counts and fails only calls on the storage of that name.
    """
    original = getattr(kind, method)
    calls = iter(range(after + 1))

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if owner in (None, getattr(self, "owner", None)) and next(calls, None) == after:
            raise RuntimeError("out of memory")
        return original(self, *arguments, **options)

    monkeypatch.setattr(kind, method, failing)
