"""Lookup of the private names of libraries that a module `internals` lists."""

from __future__ import annotations

import importlib
from functools import reduce

from hybrid_engine.ranks.torch_internals import PrivateName


def exists(private: PrivateName) -> bool:
    """Return whether the library has the name, as an attribute or set by its constructor."""
    module, _, path = private.target.partition(":")
    *owners, name = path.split(".")
    try:
        owner = reduce(getattr, owners, importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, name) or (
        isinstance(owner, type) and name in owner.__init__.__code__.co_names
    )
