"""Packages that are not there."""

from __future__ import annotations

import sys


def leave_out(package: str) -> None:
    """Let every import of `package` and of what is in it fail in this process from now on."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # what Python's own import takes for "not there"
