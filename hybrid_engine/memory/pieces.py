"""Pieces of a pool: physical memory that two sides use in turn; see pool.py."""

from __future__ import annotations

from hybrid_engine.errors import StateError


class PoolPiece:
    """Physical memory with contents of one side at a time.

    It counts the parts of that side's address range that have contents in it.
    """

    def __init__(self) -> None:
        self._side = ""
        self._parts: set[object] = set()

    def take(self, side: str, part: object) -> None:
        """Note that a part of `side` has contents here. Raises StateError if another side has."""
        if self._parts and self._side != side:
            raise StateError(
                f"memory of {side} still has contents of {self._side} ({len(self._parts)} parts): "
                "they must leave first",
                code="memory-in-use",
            )
        self._side = side
        self._parts.add(part)

    def leave(self, part: object) -> None:
        """Note that a part has no contents here any more."""
        self._parts.discard(part)


Part = tuple[int, PoolPiece]
"""Bytes of a room, and the piece behind them."""
