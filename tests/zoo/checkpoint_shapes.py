"""Names, shapes and dtypes of a checkpoint on disk for a config of any family, with repeated
tensors.

They come from the product's tables, which models/test_families.py compares with checkpoints of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_engine.models import table_for
from hybrid_engine.records.regions import Shape


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of a checkpoint on disk, by Hugging Face name."""
    table = table_for(config)
    return {
        **table.shapes,
        **{copy: table.shapes[original] for copy, original in table.copies.items()},
    }


def checkpoint_dtypes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtypes of tensors of such a checkpoint that differ from the model's dtype."""
    return dict(table_for(config).dtypes)
