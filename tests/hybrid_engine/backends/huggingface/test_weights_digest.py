"""The digest of weights is a sum over elements, independent of the boxes they are split into."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from hybrid_engine.backends.huggingface.weights_digest import _box_hash

MODULE = "hybrid_engine.backends.huggingface.weights_digest._PIECE_NUMEL"


def hash_of(tensor: torch.Tensor, salt: int = 5) -> int:
    return _box_hash(tensor, 0, tensor.stride(), salt) % 2**64


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_pieces_of_a_tensor_add_up_to_its_hash(dtype: torch.dtype) -> None:
    """Boxes on ranks are in test_hf_checkpoint.py; this one does not lie in a row."""
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = tensor.clone()
    box = tensor[2:, 3:, 1:]
    with mock.patch(MODULE, 3):  # pieces of three elements
        in_pieces = hash_of(box)
    assert in_pieces == hash_of(box)
    assert torch.equal(tensor.double(), before.double()), "hashing changed the tensor"


def test_different_tensors_have_different_hashes() -> None:
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    changed = tensor.clone()
    # The smallest possible change.
    changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))
    exchanged = tensor.clone()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    hashes = [
        *(hash_of(tensor + step) for step in range(200)),  # many small changes
        hash_of(tensor, 6),
        hash_of(changed),
        hash_of(exchanged),
        hash_of(tensor.t().contiguous()),
    ]
    assert len(set(hashes)) == len(hashes)
