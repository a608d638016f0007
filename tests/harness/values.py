"""A type that recurs in tests."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
"""Values by name: keys of a configuration, arguments of a call, a row of JSON."""
