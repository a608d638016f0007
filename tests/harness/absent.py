"""Simulation of packages that are not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_out(package: str) -> Iterator[None]:
    """Make every import of `package` and of its submodules fail in the block."""
    modules = {name: sys.modules.pop(name) for name in [*sys.modules] if f"{name}.".startswith(f"{package}.")}
    # Python's import system raises ModuleNotFoundError for a module that is None.
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(modules)
