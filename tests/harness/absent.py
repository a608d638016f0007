"""Packages that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_out(package: str) -> Iterator[None]:
    """Let every import of `package`, and of what is in it, fail in the block."""
    inside = {name: sys.modules.pop(name) for name in [*sys.modules] if f"{name}.".startswith(f"{package}.")}
    sys.modules[package] = None  # type: ignore[assignment]  # what Python's own import takes for "not there"
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(inside)
