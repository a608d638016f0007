"""Planning: box intersection of two layouts.

    for every destination shard:                      (tensor by tensor, in the model's order)
        for every source rank, nearest first:         self, then same host, then others; the least loaded of each
            move what that rank holds of the part still missing
        anything still missing is a fault

Everything is sorted and counted by position, so ranks that plan the same layouts get the same plan without talking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hybrid_engine.errors import PlanError
from hybrid_engine.planning.layout import Buffer, BufferId, Layout, Shard
from hybrid_engine.planning.plan import Bucket, ByteCount, Link, ReshardPlan, Transfer, fingerprint_of
from hybrid_engine.planning.regions import Region, subtract_all, union
from hybrid_engine.planning.validation import layout_faults, shard_fault

DEFAULT_BUCKET_NBYTES = 256 * 1024 * 1024

_DISTANCE = {link: distance for distance, link in enumerate(Link)}


def plan(
    source: Layout,
    destination: Layout,
    hosts: Sequence[str],
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    may_stay_unread: Iterable[str] = (),
) -> ReshardPlan:
    """Plan the reshard that fills every destination buffer.

    Args:
        source: the training layout of all ranks.
        destination: the inference layout of all ranks.
        hosts: host name of every global rank.
        bucket_nbytes: aim for this many destination bytes per rank and bucket; a group is never split.
        may_stay_unread: source tensors that no destination needs to read (a head tied to the embedding).

    Raises:
        PlanError: with every fault: bounds, overlaps, gaps, shapes that differ, destination regions that no rank
            holds, source tensors that nobody reads.

    Tensors are taken in the order in which the destination declares them (the model's own).
    """
    faults = [*layout_faults(source, exact=False), *layout_faults(destination, exact=True)]
    faults += _shape_faults(source, destination)
    unusable = _unusable_tensors(source, destination) if faults else set()
    src_by_tensor, dst_by_tensor = source.shards_by_tensor(), destination.shards_by_tensor()
    transfers: dict[str, list[Transfer]] = {}
    senders = _Senders(source.buffers, hosts)
    for tensor in (name for name in destination.tensors if name in dst_by_tensor and name not in unusable):
        transfers[tensor] = []
        for shard in dst_by_tensor[tensor]:
            missing = senders.fill(shard, src_by_tensor.get(tensor, []), transfers[tensor])
            faults.extend(_missing_fault(shard, region) for region in missing)
    unread = tuple(sorted(src_by_tensor.keys() - dst_by_tensor.keys()))
    expected = set(may_stay_unread)
    faults += [f"{name}: a training parameter that no inference rank reads" for name in unread if name not in expected]
    if faults:
        raise PlanError(faults)
    return ReshardPlan(
        buckets=_buckets(transfers, destination, dst_by_tensor, bucket_nbytes),
        bytes_by_rank=_count_bytes(transfers, source, src_by_tensor, dst_by_tensor),
        unread=unread,
        fingerprint=fingerprint_of(source.fingerprint(), destination.fingerprint(), hosts),
    )


def _shape_faults(source: Layout, destination: Layout) -> list[str]:
    return [
        f"{name}: shape {source.tensors[name]} in training, {destination.tensors[name]} in inference"
        for name in _tensors_of_two_shapes(source, destination)
    ]


def _tensors_of_two_shapes(source: Layout, destination: Layout) -> list[str]:
    return [name for name, shape in destination.tensors.items() if source.tensors.get(name, shape) != shape]


def _unusable_tensors(source: Layout, destination: Layout) -> set[str]:
    """Tensors whose shards cannot be intersected; their faults have been found already."""
    return set(_tensors_of_two_shapes(source, destination)) | {
        shard.region.tensor for layout in (source, destination) for shard in layout.shards if shard_fault(layout, shard)
    }


def _missing_fault(shard: Shard, region: Region) -> str:
    buffer_id = shard.place.buffer
    return (
        f"{region.tensor}: elements [{region.offsets}, {region.ends}) are wanted by {buffer_id.name!r} "
        f"on rank {buffer_id.rank}, but no training rank holds them"
    )


class _Senders:
    """Chooses who sends: the nearest rank and, among equally near ones, the one asked for fewest bytes so far."""

    def __init__(self, src_buffers: Mapping[BufferId, Buffer], hosts: Sequence[str]) -> None:
        self.src_buffers = src_buffers
        self.hosts = hosts
        self.sent_nbytes: Counter[int] = Counter()

    def fill(self, dst: Shard, sources: Sequence[Shard], transfers: list[Transfer]) -> list[Region]:
        """Append the transfers of one destination shard to `transfers`; return the parts that no source holds."""
        missing = [dst.region]
        for src in sorted(sources, key=lambda shard: self._preference(shard.place.buffer.rank, dst.place.buffer.rank)):
            for region in missing:
                common = region.intersect(src.region)
                if common is not None:
                    transfers.append(self._send(common, src, dst))
            missing = subtract_all(missing, [src.region])
            if not missing:
                break
        return missing

    def _preference(self, src_rank: int, dst_rank: int) -> tuple[int, int, int]:
        """Sort key: nearest link, then least loaded."""
        return _DISTANCE[self._link(src_rank, dst_rank)], self.sent_nbytes[src_rank], src_rank

    def _link(self, src_rank: int, dst_rank: int) -> Link:
        if src_rank == dst_rank:
            return Link.SELF
        return Link.HOST if self.hosts[src_rank] == self.hosts[dst_rank] else Link.NETWORK

    def _send(self, region: Region, src: Shard, dst: Shard) -> Transfer:
        src_id, dst_id = src.place.buffer, dst.place.buffer
        nbytes = region.numel * self.src_buffers[src_id].itemsize
        link = self._link(src_id.rank, dst_id.rank)
        if link is not Link.SELF:
            self.sent_nbytes[src_id.rank] += nbytes
        return Transfer(region.tensor, region.lengths, src.place_of(region), dst.place_of(region), nbytes, link)


def _buckets(
    transfers: Mapping[str, list[Transfer]],
    destination: Layout,
    dst_by_tensor: Mapping[str, list[Shard]],
    bucket_nbytes: int,
) -> tuple[Bucket, ...]:
    """Cut the tensors into buckets so that no destination group is spread over two."""
    buckets: list[Bucket] = []
    pending = _PendingBucket()
    for cluster in _clusters(transfers, destination, dst_by_tensor):
        pending.tensors.extend(cluster)
        for shard in (shard for tensor in cluster for shard in dst_by_tensor[tensor]):
            buffer = destination.buffers[shard.place.buffer]
            pending.groups[buffer.group] = None
            pending.nbytes[shard.place.buffer.rank] += shard.region.numel * buffer.itemsize
        if max(pending.nbytes.values()) >= bucket_nbytes:
            buckets.append(pending.close(len(buckets), transfers))
            pending = _PendingBucket()
    if pending.tensors:
        buckets.append(pending.close(len(buckets), transfers))
    return tuple(buckets)


class _PendingBucket:
    """A bucket that still takes clusters; `nbytes` are destination bytes by rank."""

    def __init__(self) -> None:
        self.tensors: list[str] = []
        self.groups: dict[str, None] = {}
        self.nbytes: Counter[int] = Counter()

    def close(self, index: int, transfers: Mapping[str, list[Transfer]]) -> Bucket:
        in_order = tuple(transfer for tensor in self.tensors for transfer in transfers[tensor])
        return Bucket(index, in_order, tuple(self.groups), max(self.nbytes.values()))


def _clusters(tensors: Iterable[str], destination: Layout, dst_by_tensor: Mapping[str, list[Shard]]) -> list[list[str]]:
    """Tensors that must stay in one bucket since they share groups, directly or through others; in order."""
    tensors = list(tensors)
    joined_to = list(range(len(tensors)))  # an earlier tensor of the same cluster; the first points to itself
    first_of_group: dict[str, int] = {}

    def first(ordinal: int) -> int:
        while joined_to[ordinal] != ordinal:
            ordinal = joined_to[ordinal]
        return ordinal

    for ordinal, tensor in enumerate(tensors):
        for shard in dst_by_tensor[tensor]:
            group = destination.buffers[shard.place.buffer].group
            ends = first(ordinal), first(first_of_group.setdefault(group, ordinal))
            joined_to[max(ends)] = min(ends)
    clusters: dict[int, list[str]] = {}
    for ordinal, tensor in enumerate(tensors):
        clusters.setdefault(first(ordinal), []).append(tensor)
    return list(clusters.values())


def _count_bytes(
    transfers: Mapping[str, list[Transfer]],
    source: Layout,
    src_by_tensor: Mapping[str, list[Shard]],
    dst_by_tensor: Mapping[str, list[Shard]],
) -> dict[int, ByteCount]:
    moved: dict[tuple[int, Link], int] = {}
    least: dict[int, int] = {}
    for tensor, tensor_transfers in transfers.items():
        for transfer in tensor_transfers:
            key = (transfer.dst_rank, transfer.link)
            moved[key] = moved.get(key, 0) + transfer.nbytes
        for rank, nbytes in _least_nbytes(source, src_by_tensor[tensor], dst_by_tensor[tensor]).items():
            least[rank] = least.get(rank, 0) + nbytes
    return {
        rank: ByteCount(
            own=moved.get((rank, Link.SELF), 0),
            host=moved.get((rank, Link.HOST), 0),
            network=moved.get((rank, Link.NETWORK), 0),
            least=nbytes,
        )
        for rank, nbytes in sorted(least.items())
    }


def _least_nbytes(source: Layout, src_shards: Sequence[Shard], dst_shards: Sequence[Shard]) -> dict[int, int]:
    """Bytes each rank must receive of one tensor whatever the plan: |needed minus held|, counted once per element."""
    itemsize = min(source.buffers[shard.place.buffer].itemsize for shard in src_shards)
    needed: dict[int, list[Region]] = {}
    held: dict[int, list[Region]] = {}
    for grouped, shards in ((needed, dst_shards), (held, src_shards)):
        for shard in shards:
            grouped.setdefault(shard.place.buffer.rank, []).append(shard.region)
    return {
        rank: itemsize * sum(piece.numel for piece in subtract_all(union(regions), held.get(rank, [])))
        for rank, regions in needed.items()
    }
