import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferkit.core.errors import KVCacheError
from inferkit.kv_cache.block_pool import BlockPool


def test_block_zero_is_never_handed_out():
    pool = BlockPool(num_blocks=5)
    assert pool.get_new_blocks(4) == [1, 2, 3, 4]
    with pytest.raises(KVCacheError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)


def test_freed_blocks_are_reused_in_the_order_they_were_freed():
    pool = BlockPool(num_blocks=6)
    pool.get_new_blocks(5)
    pool.free_blocks([3, 1])
    pool.free_blocks([5])
    assert pool.get_new_blocks(3) == [3, 1, 5]


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([1, 1], "freed twice"),
        ([0], "usable blocks 1..3"),
        ([4], "usable blocks 1..3"),
        ([-1], "usable blocks 1..3"),
        ([1, 3], "block 3 is freed but nobody"),
    ],
)
def test_a_wrong_free_raises_and_frees_nothing(block_ids, message):
    pool = BlockPool(num_blocks=4)
    pool.get_new_blocks(2)
    with pytest.raises(KVCacheError, match=message):
        pool.free_blocks(block_ids)
    assert pool.num_free == 1
    pool.check_integrity()


def test_a_pinned_block_is_not_reused_until_it_is_unpinned():
    pool = BlockPool(num_blocks=3)
    blocks = pool.get_new_blocks(2)
    pool.pin(blocks[:1])
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(1) == blocks[1:]
    assert pool.num_free == 0
    pool.unpin(blocks[:1])
    assert pool.get_new_blocks(1) == blocks[:1]


def test_unpinning_too_often_changes_nothing():
    pool = BlockPool(num_blocks=3)
    (block_id,) = pool.get_new_blocks(1)
    pool.pin([block_id])
    with pytest.raises(KVCacheError, match="unpinned but not pinned"):
        pool.unpin([block_id, block_id])
    assert pool.pin_counts[block_id] == 1


def test_a_free_block_cannot_be_pinned():
    pool = BlockPool(num_blocks=3)
    with pytest.raises(KVCacheError, match="block 2 is free"):
        pool.pin([2])


def test_generation_grows_with_each_new_content():
    pool = BlockPool(num_blocks=2)
    for expected in (1, 2, 3):
        (block_id,) = pool.get_new_blocks(1)
        assert pool.generations[block_id] == expected
        pool.free_blocks([block_id])


def test_a_cached_block_is_found_until_it_is_reused():
    pool = BlockPool(num_blocks=3)
    first, second = pool.get_new_blocks(2)
    pool.publish(first, b"a")
    pool.free_blocks([first])
    assert pool.find(b"a") == first
    pool.touch([first])
    assert pool.num_free == 0
    pool.free_blocks([first])
    assert pool.get_new_blocks(1) == [first]
    assert pool.find(b"a") is None
    pool.free_blocks([second])


def test_equal_content_keeps_the_first_block():
    pool = BlockPool(num_blocks=3)
    first, second = pool.get_new_blocks(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.check_integrity()


@given(st.integers(2, 30), st.lists(st.integers(1, 6), max_size=20))
def test_free_count_never_exceeds_the_usable_blocks(num_blocks, sizes):
    pool = BlockPool(num_blocks=num_blocks)
    held = []
    for size in sizes:
        if size <= pool.num_free:
            held.append(pool.get_new_blocks(size))
        elif held:
            pool.free_blocks(held.pop(0))
        pool.check_integrity()
        assert pool.num_free + sum(map(len, held)) == num_blocks - 1


class PoolMachine(RuleBasedStateMachine):
    """Random get / touch / free / pin / unpin / publish against plain counters."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=8)
        self.refs = [0] * 8
        self.pins = [0] * 8
        self.num_hashes = 0

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, 3))
    def get(self, count):
        for block_id in self.pool.get_new_blocks(min(count, self.pool.num_free)):
            assert self.refs[block_id] == self.pins[block_id] == 0
            self.refs[block_id] = 1

    @rule(block_id=st.integers(1, 7))
    def free(self, block_id):
        if self.refs[block_id]:
            self.pool.free_blocks([block_id])
            self.refs[block_id] -= 1
        else:
            with pytest.raises(KVCacheError):
                self.pool.free_blocks([block_id])

    @rule(block_id=st.integers(1, 7))
    def touch(self, block_id):
        self.pool.touch([block_id])
        self.refs[block_id] += 1

    @rule(block_id=st.integers(1, 7))
    def pin_or_unpin(self, block_id):
        if self.pins[block_id]:
            self.pool.unpin([block_id])
            self.pins[block_id] -= 1
        elif self.refs[block_id]:
            self.pool.pin([block_id])
            self.pins[block_id] += 1

    @rule(block_id=st.integers(1, 7))
    def publish(self, block_id):
        if self.refs[block_id]:
            self.num_hashes += 1
            self.pool.publish(block_id, str(self.num_hashes).encode())

    @invariant()
    def adds_up(self):
        self.pool.check_integrity()
        idle = sum(r == 0 and p == 0 for r, p in zip(self.refs[1:], self.pins[1:], strict=True))
        assert self.pool.num_free == idle


TestPoolMachine = PoolMachine.TestCase
