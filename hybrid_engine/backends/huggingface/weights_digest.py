"""Digest of a model's weights, the same in every parallel layout: a sum over all elements of the checkpoint's tensors.

Each element adds a 64-bit hash of its tensor's name, its place in the tensor and its bits. Which rank holds it does not
matter, and the planner picks one of those that hold the same.
"""

from __future__ import annotations

import torch

from hybrid_engine.backends.huggingface.loading import layout_of
from hybrid_engine.backends.huggingface.safetensors_files import StoredTensor
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.rendezvous import gather_side
from hybrid_engine.transports.copies import strided

_PIECE_NUMEL = 1 << 24
"""Most elements that are hashed at once: each takes 24 bytes meanwhile."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4417276706812531889, -4658895280553007687, -7723592293110705685)
"""Odd numbers of 64 bits; the last two are splitmix64's."""


@torch.no_grad()
def weights_digest(weights: TrainingWeights, job: Job) -> str:
    """Return the digest, 16 hexadecimal digits, on every rank. Collective; parameters are on the device.

    It tells whether weights are the same, and is no protection against an attacker.
    """
    with job.agreement.phase("preparing the weights"):
        weights.prepare()
    source = gather_side(job, weights)
    with job.agreement.phase("digesting the weights"):
        layout = source.layout
        dtypes = {shard.region.tensor: layout.buffers[shard.place.buffer].dtype for shard in layout.shards}
        tensors = {name: StoredTensor("", layout.tensors[name], dtype) for name, dtype in dtypes.items()}
        whole = Side.split(layout_of(tensors, dict.fromkeys(tensors, 0), {}), job.world_size)
        buffers = weights.buffers()
        own = 0
        for transfer in box_transfers(source, whole, [""] * job.world_size, job.rank):
            if transfer.src_rank == job.rank:
                box = strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()
                own += _box_hash(box, transfer.dst.offset, transfer.dst.strides, text_digest(transfer.tensor))
    shares = job.agreement.gather(str(own), str, "digesting the weights")
    return f"{sum(map(int, shares)) % 2**64:016x}"


def _box_hash(box: torch.Tensor, offset: int, strides: tuple[int, ...], salt: int) -> int:
    """Sum of the hashes of a box's elements, which lie at `offset` of their tensor with these strides."""
    if box.numel() > _PIECE_NUMEL:
        middle = len(box) // 2
        if not middle:
            return _box_hash(box[0], offset, strides[1:], salt)
        rest = _box_hash(box[middle:], offset + middle * strides[0], strides, salt)
        return rest + _box_hash(box[:middle], offset, strides, salt)
    places = torch.full((), offset, dtype=torch.int64, device=box.device)
    for length, stride in zip(box.shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length, device=box.device) * stride
    hashes = box.contiguous().view(_BITS[box.element_size()]).to(torch.int64, copy=True)
    hashes = hashes.mul_(_FACTORS[0]).add_(places.mul_(_FACTORS[1])).add_(salt)
    for shift, factor in ((32, _FACTORS[2]), (29, _FACTORS[3])):
        hashes.bitwise_xor_(hashes >> shift).mul_(factor)
    return int(hashes.bitwise_xor_(hashes >> 32).sum())
