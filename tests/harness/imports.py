"""Imports that fail, as without a package, or that Ctrl-C interrupts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED_IN = """
import sys

interrupted_in = sys.argv[1]

class Interruption:
    def find_spec(self, name, *_):
        if name == interrupted_in:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interruption())
"""
"""Program that is interrupted at the import of the module named by argument 1."""


@contextmanager
def left_out(package: str) -> Iterator[None]:
    """Make every import of `package` and of its submodules fail in the block."""
    modules = {
        name: sys.modules.pop(name)
        for name in [*sys.modules]
        if f"{name}.".startswith(f"{package}.")
    }
    # Python's import system raises ModuleNotFoundError for a module that is None.
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(modules)
