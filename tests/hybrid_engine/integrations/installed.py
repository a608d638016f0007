"""Pretended installations of frameworks, for tests of error messages."""

from __future__ import annotations

from importlib import metadata

import pytest


def pretend_version(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    """Make every distribution have this version; None: not installed."""

    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
