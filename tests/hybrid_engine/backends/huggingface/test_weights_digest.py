"""A digest of weights is a sum over elements, however they are cut into boxes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from hybrid_engine.backends.huggingface.weights_digest import _box_hash

MODULE = "hybrid_engine.backends.huggingface.weights_digest._PIECE_NUMEL"


def whole(tensor: torch.Tensor, salt: int = 5) -> int:
    return _box_hash(tensor, 0, tensor.stride(), salt) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_boxes_of_a_tensor_add_up_to_its_hash(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = tensor.clone()
    strides = tensor.stride()
    boxes = [
        (tensor[:2], 0),
        (tensor[2:, :3], 2 * strides[0]),
        (tensor[2:, 3:, 1:], 2 * strides[0] + 3 * strides[1] + 1),
        (tensor[2:, 3:, :1].clone(), 2 * strides[0] + 3 * strides[1]),
    ]
    assert sum(_box_hash(box, offset, strides, 5) for box, offset in boxes) % 2**64 == whole(tensor)
    with mock.patch(MODULE, 3):
        in_pieces = whole(tensor)
    assert in_pieces == whole(tensor)
    assert torch.equal(tensor.double(), before.double()), "it is only read"


def test_what_is_different_has_another_hash() -> None:
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    changed = tensor.clone()
    changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))
    exchanged = tensor.clone()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    hashes = [whole(tensor), whole(tensor, 6), whole(changed), whole(exchanged), whole(tensor.t().contiguous())]
    assert len(set(hashes)) == len(hashes)


def test_many_small_changes_do_not_cancel() -> None:
    tensor = torch.zeros(4096)
    assert len({whole(tensor + step) for step in range(200)}) == 200
