"""Digest of a model's weights that is the same in every parallel layout.

It is a sum over all elements of the checkpoint's tensors. Each element adds a 64-bit hash of the
tensor's name, the element's index in the tensor and its bits, so the rank that holds an element
does not matter. The planner chooses one of several ranks that hold the same element.
"""

from __future__ import annotations

import torch

from hybrid_engine.backends.huggingface.safetensors_files import StoredTensor
from hybrid_engine.backends.huggingface.saving import source_box, transfers_to_writers
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.regions import Strides
from hybrid_engine.switch.setup import gather_side

_PIECE_NUMEL = 1 << 24
"""Maximum elements that are hashed at once. Each takes 24 bytes of temporary memory."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes per element."""

_BITS_FACTOR = -7046029254386353131
_INDEX_FACTOR = -4417276706812531889
_MIX_FACTORS = (-4658895280553007687, -7723592293110685705)
"""Odd 64-bit numbers; the last two are those of splitmix64."""


@torch.no_grad()
def weights_digest(weights: TrainingWeights, job: Job) -> str:
    """Return the digest of the weights, 16 hexadecimal digits, on every rank. Collective.

    It shows whether weights are equal, and does not protect against an attacker.

    Args:
        weights: this rank's shards, on the device.
        job: job of all ranks.
    """
    with job.agreement.phase("preparing the weights"):
        weights.prepare()
    source = gather_side(job, weights)
    with job.agreement.phase("digesting the weights"):
        held = source.holdings
        tensors = {
            name: StoredTensor("", held.shapes[name], dtype) for name, dtype in held.dtypes.items()
        }
        # A plan that brings all tensors to rank 0 shows each element once, with its index as the
        # place at the destination. No element is sent.
        buffers = weights.buffers()
        share = 0
        for transfer in transfers_to_writers(source, tensors, dict.fromkeys(tensors, 0), {}, job):
            if transfer.src_rank != job.rank:
                continue
            box = source_box(transfer, buffers)
            salt = text_digest(transfer.tensor)
            share += _box_hash(box, transfer.dst.offset, transfer.dst.strides, salt)
    # As text, because the sum of several boxes may exceed 64 bits.
    shares = job.agreement.gather(str(share), str, "digesting the weights")
    return f"{sum(map(int, shares)) % 2**64:016x}"


def _box_hash(box: torch.Tensor, offset: int, strides: Strides, salt: int) -> int:
    """Return the sum of the hashes of a box's elements.

    Args:
        box: the elements; they are not changed.
        offset: index of the first element in the flattened tensor.
        strides: steps in the flattened tensor, in elements per dim of the box.
        salt: digest of the tensor's name.
    """
    if box.numel() > _PIECE_NUMEL:
        middle = len(box) // 2
        if not middle:  # one row, which is split along the next dim
            return _box_hash(box[0], offset, strides[1:], salt)
        rest = _box_hash(box[middle:], offset + middle * strides[0], strides, salt)
        return rest + _box_hash(box[:middle], offset, strides, salt)
    indices = torch.full((), offset, dtype=torch.int64, device=box.device)
    for length, stride in zip(box.shape, strides, strict=True):
        indices = indices.unsqueeze(-1) + torch.arange(length, device=box.device) * stride
    bits = box.contiguous().view(_BITS[box.element_size()])
    # A copy even of int64, because the following operations are in place.
    hashes = bits.to(torch.int64, copy=True)
    hashes.mul_(_BITS_FACTOR).add_(indices.mul_(_INDEX_FACTOR)).add_(salt)
    # Mixed as in splitmix64: sums of the products alone would let small changes cancel.
    for shift, factor in zip((32, 29), _MIX_FACTORS, strict=True):
        hashes.bitwise_xor_(hashes >> shift).mul_(factor)
    return int(hashes.bitwise_xor_(hashes >> 32).sum())
