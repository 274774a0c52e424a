import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.errors import ConfigError
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from tests.fakes import make_spec


def make_manager(*specs, num_blocks=11, block_size=4, max_model_len=64, **kwargs):
    return KVCacheManager(
        specs=specs or [make_spec(block_size=block_size)],
        max_model_len=max_model_len,
        max_num_requests=8,
        free_bytes=1 << 30,
        block_size=block_size,
        num_blocks=num_blocks,
        **kwargs,
    )


def allocate(kv_cache, request_id, computed, new, **kwargs):
    return kv_cache.allocate_slots(
        request_id, num_computed_tokens=computed, num_new_tokens=new, **kwargs
    )


def test_full_attention_takes_one_block_per_started_block_size():
    kv_cache = make_manager()
    assert allocate(kv_cache, 1, 0, 9)
    assert kv_cache.block_ids(1) == {"full_attention": [1, 2, 3]}
    assert allocate(kv_cache, 1, 9, 3)
    assert kv_cache.block_ids(1)["full_attention"] == [1, 2, 3]
    assert allocate(kv_cache, 1, 12, 1)
    assert kv_cache.block_ids(1)["full_attention"] == [1, 2, 3, 4]


def test_reserved_tokens_admit_two_of_three():
    """reference.md section 5.3: 10 blocks of 4, reserve 8, three requests of 9 tokens."""
    kv_cache = make_manager()
    admitted = [allocate(kv_cache, i, 0, 9, num_reserved_tokens=8) for i in range(3)]
    assert admitted == [True, True, False]
    kv_cache.check_integrity()


def test_sliding_window_vectors():
    """reference.md section 5.3: block size 4, window 8."""
    kv_cache = make_manager(make_spec(window=8))
    assert allocate(kv_cache, 1, 0, 21)
    assert kv_cache.block_ids(1) == {"sliding_window": [0, 0, 0, 1, 2, 3]}
    assert allocate(kv_cache, 1, 29, 1)
    assert kv_cache.block_ids(1) == {"sliding_window": [0, 0, 0, 0, 0, 3, 4, 5]}
    kv_cache.check_integrity()


@pytest.mark.parametrize("prompt_len", range(1, 52))
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_window_start_of_the_first_decode_is_real_whatever_the_lookahead(prompt_len, lookahead):
    """Lookahead must not move the window (defect 12 of reference.md section 9.2)."""
    kv_cache = make_manager(make_spec(window=8), num_blocks=40)
    assert allocate(kv_cache, 1, 0, prompt_len, num_lookahead_tokens=lookahead)
    first_visible = max(0, prompt_len - 8 + 1)
    blocks = kv_cache.block_ids(1)["sliding_window"]
    assert all(blocks[first_visible // 4 :])


def test_slot_mapping_of_a_packed_batch():
    """reference.md item 14: tables [2,7],[5],[1], block size 4, lengths 5, 2, 3."""
    kv_cache = make_manager()
    manager = kv_cache.managers["full_attention"]
    manager.tables[1, :2], manager.tables[2, 0], manager.tables[3, 0] = [2, 7], 5, 1
    rows = np.repeat([1, 2, 3], [5, 2, 3])
    positions = np.array([0, 1, 2, 3, 4, 0, 1, 0, 1, 2])
    assert manager.slot_mapping(rows, positions).tolist() == [8, 9, 10, 11, 28, 20, 21, 4, 5, 6]
    decode = manager.slot_mapping(np.array([1, 2, 3]), np.array([5, 2, 3]))
    assert decode.tolist() == [29, 22, 7]


def test_nothing_is_taken_when_one_attention_type_is_short():
    kv_cache = make_manager(make_spec(), make_spec(window=8, layer_idx=1), num_blocks=6)
    assert allocate(kv_cache, 1, 0, 20)
    assert kv_cache.managers["full_attention"].pool.num_free == 0
    free_before = kv_cache.managers["sliding_window"].pool.num_free
    assert not allocate(kv_cache, 2, 0, 4)
    assert kv_cache.managers["sliding_window"].pool.num_free == free_before
    assert kv_cache.block_ids(2) == {"full_attention": [], "sliding_window": []}
    kv_cache.check_integrity()


def test_counts_that_cannot_be_are_refused():
    kv_cache = make_manager()
    with pytest.raises(ValueError, match="needs 65 tokens, max_model_len is 64"):
        allocate(kv_cache, 1, 60, 5)
    with pytest.raises(ValueError, match="negative"):
        allocate(kv_cache, 1, 0, -1)


def test_lookahead_stops_at_the_longest_request():
    kv_cache = make_manager(max_model_len=12)
    assert allocate(kv_cache, 1, 11, 1, num_lookahead_tokens=8)
    assert len(kv_cache.block_ids(1)["full_attention"]) == 3


def test_prefix_hit_shares_blocks_and_leaves_a_token_to_compute():
    kv_cache = make_manager(enable_prefix_cache=True)
    tokens = list(range(12))
    assert kv_cache.match_prefix(1, tokens) == 0
    assert allocate(kv_cache, 1, 0, 12)
    kv_cache.publish(1, tokens, 12)
    assert kv_cache.match_prefix(2, tokens) == 8
    assert kv_cache.match_prefix(3, tokens + [99]) == 12
    assert kv_cache.block_ids(3)["full_attention"] == kv_cache.block_ids(1)["full_attention"]
    kv_cache.check_integrity()
    for request_id in (1, 2, 3):
        kv_cache.free(request_id)
    assert kv_cache.num_used_blocks == 0
    assert kv_cache.match_prefix(4, tokens[:5] + [77] * 8) == 4


def test_only_computed_blocks_are_published():
    kv_cache = make_manager(enable_prefix_cache=True)
    tokens = list(range(12))
    allocate(kv_cache, 1, 0, 12)
    kv_cache.publish(1, tokens[:7], 7)
    assert kv_cache.match_prefix(2, tokens) == 4


def test_least_recently_used_prefix_goes_first():
    kv_cache = make_manager(num_blocks=5, enable_prefix_cache=True)
    for request_id, start in ((1, 0), (2, 100)):
        tokens = list(range(start, start + 8))
        assert allocate(kv_cache, request_id, 0, 8)
        kv_cache.publish(request_id, tokens, 8)
    kv_cache.free(1)
    kv_cache.free(2)
    assert allocate(kv_cache, 3, 0, 4)  # takes the tail of request 1's prefix
    assert kv_cache.match_prefix(4, [*range(8), 1]) == 4
    assert kv_cache.match_prefix(5, [*range(100, 108), 1]) == 8


def test_sliding_window_hit_needs_only_the_window():
    kv_cache = make_manager(make_spec(window=8), num_blocks=20, enable_prefix_cache=True)
    tokens = list(range(24))
    for start in range(0, 24, 4):
        assert allocate(kv_cache, 1, start, 4)
        kv_cache.publish(1, tokens, start + 4)
    assert kv_cache.block_ids(1)["sliding_window"][:3] == [0, 0, 0]
    kv_cache.free(1)
    assert kv_cache.match_prefix(2, tokens + [5]) == 24
    blocks = kv_cache.block_ids(2)["sliding_window"]
    assert blocks[:3] == [0, 0, 0] and all(blocks[4:])
    kv_cache.check_integrity()


def test_capacity_error_names_the_numbers():
    kv_cache = make_manager(num_blocks=4)
    assert kv_cache.capacity_error(12) is None
    message = kv_cache.capacity_error(13)
    assert message is not None
    assert message.startswith("13 tokens need 4 KV blocks of 4 tokens")
    assert "has 3" in message


@pytest.mark.parametrize(
    ("prefix_cache", "free_bytes", "expected"),
    [(False, 1 << 30, 8 * 16 + 1), (True, 1 << 30, 8 * 32 + 1), (False, 64 * 4 * 20, 20)],
)
def test_pool_size_is_the_need_or_what_memory_leaves(prefix_cache, free_bytes, expected):
    kv_cache = KVCacheManager(
        specs=[make_spec()],
        max_model_len=64,
        max_num_requests=8,
        free_bytes=free_bytes,
        mem_fraction=1.0,
        block_size=4,
        enable_prefix_cache=prefix_cache,
    )
    assert kv_cache.num_blocks == {"full_attention": expected}


def test_memory_too_small_for_one_request_is_an_error():
    with pytest.raises(ConfigError, match="engine.max_model_len=64 needs 17 KV blocks of 256"):
        KVCacheManager(
            specs=[make_spec()],
            max_model_len=64,
            max_num_requests=8,
            free_bytes=256 * 16,
            mem_fraction=1.0,
            block_size=4,
        )


def test_prefix_cache_needs_blocks_of_the_configured_size():
    with pytest.raises(ConfigError, match="enable_prefix_cache=true needs blocks of"):
        make_manager(make_spec(block_size=64), enable_prefix_cache=True)


def test_window_pool_has_a_spare_window_and_doubles_with_the_prefix_cache():
    sizes = []
    for prefix_cache in (False, True):
        kv_cache = KVCacheManager(
            specs=[make_spec(window=8)],
            max_model_len=64,
            max_num_requests=8,
            free_bytes=1 << 30,
            block_size=4,
            enable_prefix_cache=prefix_cache,
        )
        sizes.append(kv_cache.num_blocks["sliding_window"])
    assert sizes == [9 * 3 + 1, 17 * 3 + 1]


def test_window_bytes_are_taken_from_full_attention():
    full, window = make_spec(), make_spec(window=8, layer_idx=1)
    kv_cache = KVCacheManager(
        specs=[full, window],
        max_model_len=64,
        max_num_requests=2,
        free_bytes=256 * (10 + 20),
        mem_fraction=1.0,
        block_size=4,
    )
    assert kv_cache.num_blocks == {"sliding_window": 10, "full_attention": 20}
    with pytest.raises(ConfigError, match="sliding-window cache of 2 requests needs 2560 bytes"):
        KVCacheManager(
            specs=[full, window],
            max_model_len=64,
            max_num_requests=2,
            free_bytes=2000,
            mem_fraction=1.0,
            block_size=4,
        )


def test_layers_of_one_key_must_agree():
    with pytest.raises(ConfigError, match="differ in"):
        make_manager(make_spec(block_size=4), make_spec(block_size=8, layer_idx=1))


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([None, 3, 8]),
    prefix_cache=st.booleans(),
    actions=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["grow", "free", "pin"]), st.integers(1, 9)),
        max_size=40,
    ),
)
def test_random_allocate_append_pin_free_keeps_integrity(window, prefix_cache, actions):
    kv_cache = make_manager(
        make_spec(window=window), num_blocks=12, enable_prefix_cache=prefix_cache
    )
    pool = next(iter(kv_cache.managers.values())).pool
    lengths: dict[int, int] = {}
    pinned: list[list[int]] = []
    for request_id, action, size in actions:
        if action == "free":
            kv_cache.free(request_id)
            lengths.pop(request_id, None)
        elif action == "pin" and request_id in lengths:
            blocks = [b for b in next(iter(kv_cache.block_ids(request_id).values())) if b]
            pool.pin(blocks)
            pinned.append(blocks)
        elif action == "grow":
            tokens = [request_id % 2] * 64
            if request_id not in lengths:
                lengths[request_id] = kv_cache.match_prefix(request_id, tokens[:20])
            start = lengths[request_id]
            if start + size <= 64 and allocate(kv_cache, request_id, start, size):
                lengths[request_id] = start + size
                kv_cache.publish(request_id, tokens, start + size)
        kv_cache.check_integrity()
    for request_id in list(lengths):
        kv_cache.free(request_id)
    for blocks in pinned:
        pool.unpin(blocks)
    assert kv_cache.num_used_blocks == 0
    kv_cache.check_integrity()
