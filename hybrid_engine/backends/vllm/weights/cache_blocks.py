"""The blocks of vLLM's KV cache: where they lie, and in which order requests get them.

    blocks = CacheBlocks(runner, pool)
    blocks.ranges(nbytes, granule)    memory that requests need first, and last
    blocks.hold(addresses, release)   requests get the other blocks first, and wait for `release`
                                      before they get one of these

A block has memory in every layer, at the layer's address plus its number times a stride.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.memory.offload_items import Spans
from hybrid_engine.memory.pool import AddressRange


class CacheBlocks:
    """Blocks of one engine, whose scheduler is in this process.

    Args:
        runner: vLLM's model runner.
        pool: the scheduler's pool of blocks.

    Attributes:
        address: of the cache.
        layers: address of the first block of each layer, and bytes from one block to the next.
    """

    def __init__(self, runner: Any, pool: Any) -> None:
        config = runner.kv_cache_config
        self._pool = pool
        self._num_blocks = config.num_blocks
        storage = runner.kv_caches[0].untyped_storage()
        self.address = storage.data_ptr()
        self._end = self.address + storage.nbytes()
        self.layers = [
            (self.address + tensor.offset + number * tensor.layer_stride, tensor.block_stride)
            for tensor in config.kv_cache_tensors
            for number in range(len(getattr(tensor, "layers", ())))
        ]
        self._first_held = self._num_blocks
        get_new_blocks = pool.get_new_blocks

        def get_others_first(num_blocks: int) -> Any:
            if self._first_held < self._num_blocks:
                self._prepare(num_blocks)
            return get_new_blocks(num_blocks)

        pool.get_new_blocks = get_others_first

    @property
    def cover_all(self) -> bool:
        """True if every byte of the cache is known to be a block's."""
        return not self._addresses_from(0).missing(self.address, self._end)

    def ranges(self, nbytes: int, granule: int) -> list[AddressRange]:
        """Return the cache's ranges of whole granules, which are those of one segment.

        Last are as few of the last blocks as have `nbytes` bytes in granules, or all of them.
        """
        # From a later block on there are fewer bytes: with 100, 80, 60, 40, 20 bytes from blocks 0
        # to 4 and `nbytes` of 60, bisect finds 3, and block 2 is the last with enough. Negated, the
        # sizes ascend, as bisect needs.
        first = bisect_right(
            range(self._num_blocks),
            -nbytes,
            key=lambda block: -self._granules_from(block, granule).nbytes,
        )
        last = self._granules_from(max(first - 1, 0), granule)
        end = self.address + round_up(self._end - self.address, granule)
        others = last.missing(self.address, end)
        return [
            AddressRange(start, stop - start, self.address, is_late=True, is_last=spans is last)
            for spans in (last, others)
            for start, stop in spans
        ]

    def hold(self, addresses: Spans, release: Callable[[], None]) -> None:
        """Call `release` before a request gets a block with memory at these addresses.

        Requests get the others first. Every block must be free.
        """
        self._first_held = self._first_of(addresses)
        self._release: Callable[[], None] = release
        # Steps without requests write block 0, which no request gets.
        if not self._first_held:
            self._let_go()
        elif addresses.nbytes:
            self._put_first(self._pool.blocks[1:])

    def _prepare(self, num_blocks: int) -> None:
        """Put free blocks first that are not held, or let go if there are few of them."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head
        # `else` runs if all of the first `num_blocks` free blocks may be given out.
        for _ in range(num_blocks):
            block = block.next_free_block
            if block.block_id >= self._first_held:
                break
        else:
            return
        # Cached blocks that requests have left stand behind the held ones.
        free = queue.get_all_free_blocks()
        # Stable, so that blocks that may be given out keep their order, which is vLLM's order of
        # eviction.
        free.sort(key=lambda block: block.block_id >= self._first_held)
        # It takes milliseconds, so not for a few.
        if free[: max(num_blocks, self._first_held // 8)][-1].block_id < self._first_held:
            self._put_first(free)
        else:
            self._let_go()

    def _put_first(self, blocks: list[Any]) -> None:
        self._pool.free_block_queue = type(self._pool.free_block_queue)(blocks)

    def _let_go(self) -> None:
        self._release()
        self._first_held = self._num_blocks

    def _addresses_from(self, block: int) -> Spans:
        addresses = Spans()
        for start, stride in self.layers:
            addresses.add(start + block * stride, min(start + self._num_blocks * stride, self._end))
        return addresses

    def _granules_from(self, block: int, granule: int) -> Spans:
        """Return the whole granules that have only this block and those after it."""
        whole = Spans()
        for start, stop in self._addresses_from(block):
            # Inwards at both ends: a granule with a part of an earlier block is that block's.
            first = round_up(start - self.address, granule)
            last = stop - self.address
            # What follows the cache in its last granule belongs to nobody.
            last = round_up(last, granule) if stop == self._end else last // granule * granule
            whole.add(self.address + first, self.address + last)
        return whole

    def _first_of(self, addresses: Spans) -> int:
        """Return the first block that has memory at these addresses; 0 if they are of others."""
        first = self._num_blocks
        for start, stop in addresses:
            if not self.address <= start < self._end:
                return 0
            for layer, stride in self.layers:
                if layer < stop and start < layer + self._num_blocks * stride:
                    first = min(first, max(start - layer, 0) // stride)
        return first
