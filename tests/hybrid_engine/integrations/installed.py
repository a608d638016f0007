"""Frameworks that are installed, or are not, for tests of what is said then."""

from __future__ import annotations

from importlib import metadata

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Every distribution has this version; None: it is missing."""

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
