"""Parallel sizes."""

from __future__ import annotations

LARGEST_SIZE = 2**20
"""Of any parallel size; far beyond any job, and small enough that nothing which is made of it overflows."""
