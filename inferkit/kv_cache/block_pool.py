"""The physical blocks of one attention type: who holds which, which are free, which are cached.

Knows neither requests nor tensors. Not thread-safe: one pool belongs to one scheduler loop.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from inferkit.core.errors import KVCacheError

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1 are handed out; block 0 is the null block and never is.

    A block is free when nobody refers to it (`ref_count`) and no transfer holds it (`pin_count`).
    Free blocks queue up in the order in which they became free and are reused from the front. A
    free block keeps its content hash until it is reused, so that an equal prefix can find it.
    `generation` of a block grows each time it is handed out for new content.
    """

    def __init__(self, *, num_blocks: int) -> None:
        if num_blocks < 2:
            raise KVCacheError(
                f"num_blocks={num_blocks} leaves no usable block; at least 2 are needed "
                "(the null block and one more)"
            )
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.pin_counts = [0] * num_blocks
        self.generations = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are referred to or pinned; the null block does not count."""
        return self.num_blocks - 1 - len(self._free)

    def get_new_blocks(self, num: int) -> list[int]:
        """Take `num` blocks for new content; their old content can no longer be found.

        Raises:
            KVCacheError: fewer than `num` blocks are free; nothing was taken.
        """
        if num > len(self._free):
            raise KVCacheError(f"{num} blocks asked for, {len(self._free)} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block_id in block_ids:
            self._forget(block_id)
            self.generations[block_id] += 1
            self.ref_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Refer once more to blocks whose content is wanted, free or not."""
        for block_id in block_ids:
            self._check_id(block_id)
            self._free.pop(block_id, None)
            self.ref_counts[block_id] += 1

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block, in order.

        Raises:
            KVCacheError: an id is out of range, null, repeated, or not referred to. Nothing is
                freed then.
        """
        if len(set(block_ids)) != len(block_ids):
            raise KVCacheError(f"the same block is freed twice in one call: {list(block_ids)}")
        for block_id in block_ids:
            self._check_id(block_id)
            if self.ref_counts[block_id] == 0:
                raise KVCacheError(f"block {block_id} is freed but nobody refers to it")
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            self._release(block_id)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keep blocks from being reused while a transfer reads or writes them.

        Raises:
            KVCacheError: a block is free: its content may already be somebody else's.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            self._check_id(block_id)
            if block_id in self._free:
                raise KVCacheError(f"block {block_id} is free and cannot be pinned")
        for block_id in block_ids:
            self.pin_counts[block_id] += 1

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo one `pin` of each block; on an error nothing is unpinned."""
        counts = Counter(block_ids)
        for block_id, count in counts.items():
            self._check_id(block_id)
            if self.pin_counts[block_id] < count:
                raise KVCacheError(f"block {block_id} is unpinned but not pinned")
        for block_id, count in counts.items():
            self.pin_counts[block_id] -= count
            self._release(block_id)

    def publish(self, block_id: int, content_hash: bytes) -> None:
        """Make a full block findable; a hash that another block already has stays with that one."""
        self._check_id(block_id)
        if self.ref_counts[block_id] == 0:
            raise KVCacheError(f"block {block_id} is published but nobody refers to it")
        if content_hash not in self._block_of_hash and self._hashes[block_id] is None:
            self._hashes[block_id] = content_hash
            self._block_of_hash[content_hash] = block_id

    def find(self, content_hash: bytes) -> int | None:
        """The block with this content, whether free or in use."""
        return self._block_of_hash.get(content_hash)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def check_integrity(self) -> None:
        """Raise KVCacheError unless free, used and cached blocks add up."""
        for block_id in range(self.num_blocks):
            refs, pins = self.ref_counts[block_id], self.pin_counts[block_id]
            is_idle = refs == 0 and pins == 0 and block_id != NULL_BLOCK
            if refs < 0 or pins < 0 or is_idle != (block_id in self._free):
                raise KVCacheError(
                    f"block {block_id}: refs={refs} pins={pins} free={block_id in self._free}"
                )
        for content_hash, block_id in self._block_of_hash.items():
            if self._hashes[block_id] != content_hash:
                raise KVCacheError(f"block {block_id} is found under a hash that is not its own")
        num_hashed = sum(content_hash is not None for content_hash in self._hashes)
        if num_hashed != len(self._block_of_hash):
            raise KVCacheError(
                f"{num_hashed} blocks hold a hash, {len(self._block_of_hash)} can be found"
            )

    def _release(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0 and self.pin_counts[block_id] == 0:
            self._free[block_id] = None

    def _forget(self, block_id: int) -> None:
        content_hash = self._hashes[block_id]
        if content_hash is not None:
            del self._block_of_hash[content_hash]
            self._hashes[block_id] = None

    def _check_id(self, block_id: int) -> None:
        if not NULL_BLOCK < block_id < self.num_blocks:
            raise KVCacheError(
                f"block id {block_id} is not one of the usable blocks 1..{self.num_blocks - 1}"
            )
