import pytest
import torch

from inferkit.core.errors import KVCacheError
from inferkit.kv_cache.host_store import HostStore, can_run_short, left_for_pools
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from tests.fakes import make_spec

FULL, WINDOW = "full_attention", "sliding_window"


def make_caches(num_blocks=9, dtype=torch.float32):
    """Two layers of full attention, one of a window; every byte is different noise."""
    generator = torch.Generator().manual_seed(0)

    def tensor(heads, dim):
        size = num_blocks * 4 * heads * dim * dtype.itemsize
        noise = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        return noise.view(dtype).view(num_blocks, 4, heads, dim)

    return {
        FULL: [tensor(2, 8), tensor(2, 8), tensor(1, 16), tensor(1, 4)],
        WINDOW: [tensor(2, 8), tensor(2, 8)],
    }


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_for_bit_at_other_places(dtype):
    caches = make_caches(dtype=dtype)
    store = HostStore(caches=caches, num_bytes=1 << 30)
    before = {key: [tensor.clone() for tensor in tensors] for key, tensors in caches.items()}
    old, new = {FULL: [3, 1, 8], WINDOW: [0, 0, 5]}, {FULL: [2, 8, 4], WINDOW: [0, 0, 1]}

    assert store.save(7, old)
    for tensors in caches.values():
        for tensor in tensors:
            as_bytes(tensor).fill_(255)
    store.restore(7, new)
    store.drop(7)

    for key, tensors in caches.items():
        for tensor, original in zip(tensors, before[key], strict=True):
            for source, target in zip(old[key], new[key], strict=True):
                if source:
                    assert torch.equal(as_bytes(tensor[target]), as_bytes(original[source]))
    assert (as_bytes(caches[FULL][0][1]) == 255).all(), "other blocks are not touched"
    assert store.num_requests == 0
    store.check_integrity()


def test_places_that_were_not_kept_or_are_not_wanted_are_left_out():
    caches = make_caches()
    store = HostStore(caches=caches, num_bytes=1 << 30)
    store.save(1, {FULL: [1, 2], WINDOW: [0, 3, 4]})
    before = caches[WINDOW][0].clone()

    store.restore(1, {FULL: [5, 6, 7], WINDOW: [0, 0, 6, 7]})

    assert torch.equal(as_bytes(caches[WINDOW][0][6]), as_bytes(before[4]))
    assert torch.equal(as_bytes(caches[WINDOW][0][:6]), as_bytes(before[:6]))
    assert torch.equal(as_bytes(caches[WINDOW][0][7]), as_bytes(before[7]))


def test_a_request_that_does_not_fit_takes_nothing():
    caches = make_caches()
    store = HostStore(caches=caches)
    assert [store.num_free_blocks(key) for key in caches] == [2, 2]
    assert not store.save(1, {FULL: [1, 2], WINDOW: [1, 2, 3]})
    assert store.save(2, {FULL: [1], WINDOW: [1]})
    assert not store.save(3, {FULL: [1, 2], WINDOW: [0, 0]})
    assert store.save(4, {FULL: [1], WINDOW: [0]})
    store.check_integrity()
    store.drop(2)
    assert [store.num_free_blocks(key) for key in caches] == [1, 2]


def test_the_reserve_is_a_quarter_of_the_pools_or_as_told_and_never_more_than_they():
    caches = make_caches()
    pool_bytes = sum(tensor[1:].nbytes for tensors in caches.values() for tensor in tensors)
    assert HostStore(caches=caches).num_bytes == pool_bytes // 4
    assert HostStore(caches=caches, num_bytes=pool_bytes // 2).num_bytes == pool_bytes // 2
    assert HostStore(caches=caches, num_bytes=10 * pool_bytes).num_bytes == pool_bytes
    assert not HostStore(caches=caches, num_bytes=1).save(1, {FULL: [1], WINDOW: [1]})
    with pytest.raises(ValueError, match="host_bytes=-1"):
        HostStore(caches=caches, num_bytes=-1)


def test_a_request_is_kept_once_and_only_while_it_is_here():
    store = HostStore(caches=make_caches())
    store.save(1, {FULL: [1], WINDOW: [1]})
    with pytest.raises(KVCacheError, match="already"):
        store.save(1, {FULL: [1], WINDOW: [1]})
    store.drop(1)
    for call in (lambda: store.drop(1), lambda: store.restore(1, {FULL: [1], WINDOW: [1]})):
        with pytest.raises(KVCacheError, match="request 1 is not in the host store"):
            call()


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_where_every_request_fits_at_its_longest_nothing_is_reserved(windows):
    def make(num_blocks):
        return KVCacheManager(
            specs=[make_spec(window=window, layer_idx=i) for i, window in enumerate(windows)],
            max_model_len=16,
            max_num_requests=3,
            free_bytes=1 << 20,
            block_size=4,
            num_blocks=num_blocks,
        )

    assert can_run_short(make(12)) and not can_run_short(make(13)) and not can_run_short(make(0))
    assert HostStore(caches=make_caches(), is_needed=False).num_bytes == 0
    assert HostStore(caches=make_caches(), is_needed=False, num_bytes=1 << 30).num_bytes > 0


def test_pools_leave_memory_for_a_store_beside_them() -> None:
    assert left_for_pools(1000, 0) == 800, "the store takes a quarter of that"
    assert left_for_pools(1000, 300) == 700
    assert left_for_pools(1000, 2000) == 0
