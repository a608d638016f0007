"""Images of a batch's rows, as a model's vision tower takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.errors import Violation, shortened
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors

IMAGES = "images"
"""Key of a batch for its `ImageRows`."""


class ImageRows:
    """Inputs of a vision tower, for each row of a batch.

    A mapping of tensors for each row, because images differ in size. Rows of the same images share
    theirs. They stay on the host until a model computes their micro batch.

    Args:
        rows: for each row, the tensors that a processor of transformers makes of its images, such
            as `pixel_values` [patches, elements] and `image_grid_thw` [images, 3]; empty without
            an image.
    """

    def __init__(self, rows: Sequence[Tensors]) -> None:
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | torch.Tensor) -> ImageRows:
        if isinstance(rows, torch.Tensor):
            return ImageRows([self.rows[row] for row in rows.tolist()])
        return ImageRows(self.rows[rows])

    def joined(self, device: torch.device) -> TensorDict:
        """Return copies on `device` of all rows' tensors, each name's concatenated along dim 0."""
        # Completions of one prompt share its tensors, which go to the device once.
        distinct = {id(tensor): tensor for row in self.rows for tensor in row.values()}
        copies = {key: tensor.to(device) for key, tensor in distinct.items()}
        return {
            name: torch.cat([copies[id(row[name])] for row in self.rows]) for name in self.rows[0]
        }


def images_in(batch: Mapping[str, Any]) -> ImageRows | None:
    """Return the images of a batch; None if it has text alone."""
    images = batch.get(IMAGES)
    return images if isinstance(images, ImageRows) else None


def with_images(batch: Batch, completions: Sequence[Any]) -> dict[str, Any]:
    """Return a batch with the images of its completions' prompts; unchanged if there are none."""
    rows = [getattr(completion, "image_inputs", None) or {} for completion in completions]
    return {**batch, IMAGES: ImageRows(rows)} if any(rows) else dict(batch)


def image_violations(batch: Mapping[str, Any], refusal: str) -> list[Violation]:
    """Return what is wrong with the images of a batch.

    Args:
        batch: rows of tokens, with or without images.
        refusal: reason why the model takes no images; "" if it does.
    """
    images = images_in(batch)
    if images is None:
        return []
    if refusal:
        return [
            Violation(
                IMAGES,
                refusal,
                "Use prompts of text, or a trainer that takes images",
                code="images-unsupported",
            )
        ]
    num_rows = len(batch["tokens"])
    if len(images) != num_rows:
        return [
            Violation(
                IMAGES,
                f"has {len(images)} rows, but tokens have {num_rows}",
                "Pass the images of each row",
                code="wrong-number-of-rows",
            )
        ]
    # The ranks gather the layers of the vision tower together, in each micro batch or in none.
    without = [row for row, inputs in enumerate(images.rows) if not inputs]
    if without:
        return [
            Violation(
                IMAGES,
                f"row {without[0]} has none, and {num_rows - len(without)} rows have some",
                "Make batches of prompts that all have an image, or all have none",
                code="rows-without-images",
            )
        ]
    kinds = {
        tuple((name, inputs[name].dtype, inputs[name].shape[1:]) for name in sorted(inputs))
        for inputs in images.rows
    }
    if len(kinds) > 1:
        return [
            Violation(
                IMAGES,
                f"rows have different tensors: {shortened(sorted(map(str, kinds)))}",
                "Pass the tensors of one processor",
                code="different-images",
            )
        ]
    return []
