"""Names, shapes and dtypes of a checkpoint on disk for a config of any family, with the tensors that it repeats.

They are the tables': models/test_families.py compares these with what transformers writes, for each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_engine.models import table_for


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of a checkpoint on disk for a config.json."""
    table = table_for(config)
    return {**table.shapes, **{copy: table.shapes[original] for copy, original in table.copies.items()}}


def checkpoint_dtypes(config: Mapping[str, Any]) -> dict[str, str]:
    """Tensors of such a checkpoint whose dtype is not the model's."""
    return dict(table_for(config).dtypes)
