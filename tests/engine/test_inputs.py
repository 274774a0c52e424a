import pytest
import torch

from inferkit.core.batch import Batch, BatchRow
from inferkit.core.request import Request
from inferkit.core.sampling_params import SamplingParams
from inferkit.engine.exe_mode import Eager
from inferkit.engine.inputs import InputBuilder
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.platforms.cpu import CpuPlatform
from tests.fakes import make_spec


def make_builder(buckets=(), block_size=4):
    kv_cache = KVCacheManager(
        specs=[make_spec(block_size=block_size)],
        max_model_len=32,
        max_num_requests=8,
        free_bytes=1 << 20,
        block_size=block_size,
    )
    return kv_cache, InputBuilder(
        kv_cache=kv_cache,
        platform=CpuPlatform(),
        dtype="float32",
        exe_mode=Eager(batch_buckets=buckets),
    )


def make_rows(kv_cache, lens, *, computed=0, num_tokens=None):
    rows = []
    for request_id, prompt_len in enumerate(lens):
        start = prompt_len if computed else 0
        num = num_tokens or prompt_len
        request = Request(
            request_id=request_id,
            prompt_token_ids=[10 * request_id + i for i in range(prompt_len)],
            output_token_ids=[77] if computed else [],
            sampling=SamplingParams(),
            seed=0,
        )
        assert kv_cache.allocate_slots(request_id, num_computed_tokens=start, num_new_tokens=num)
        rows.append(
            BatchRow(
                request=request,
                num_computed_tokens=start,
                num_scheduled_tokens=num,
                is_prefill=not computed,
                samples=True,
            )
        )
    return rows


def test_prefill_metadata():
    """reference.md item 16: lengths 5, 2, 3."""
    kv_cache, builder = make_builder()
    inputs = builder.build(Batch(rows=make_rows(kv_cache, (5, 2, 3))))
    metadata = inputs.forward_metadata
    assert inputs.input_ids.tolist() == [0, 1, 2, 3, 4, 10, 11, 20, 21, 22]
    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
    assert metadata.is_prefill and metadata.prompt_tokens == 10
    assert metadata.actual_seq_lengths_cu_q.tolist() == [5, 7, 10]
    assert metadata.logits_indices.tolist() == [4, 6, 9]
    assert metadata.kv_len.tolist() == [4, 1, 2]
    assert metadata.block_table["full_attention"][:, :2].tolist() == [[1, 2], [3, 0], [4, 0]]
    assert metadata.block_table["full_attention"].dtype is torch.int32
    slots = metadata.slot_mapping["full_attention"].tolist()
    assert slots == [4, 5, 6, 7, 8, 12, 13, 16, 17, 18]


def test_decode_metadata():
    """reference.md item 17: the decode after those prompts."""
    kv_cache, builder = make_builder()
    make_rows(kv_cache, (5, 2, 3))
    inputs = builder.build(Batch(rows=make_rows(kv_cache, (5, 2, 3), computed=1, num_tokens=1)))
    metadata = inputs.forward_metadata
    assert inputs.input_ids.tolist() == [77, 77, 77]
    assert inputs.position_ids.tolist() == [5, 2, 3]
    assert not metadata.is_prefill and metadata.prompt_tokens == 0
    assert metadata.actual_seq_lengths_kv.tolist() == [6, 3, 4]
    assert metadata.actual_seq_lengths_cu_q.tolist() == [1, 2, 3]
    assert metadata.actual_seq_lengths_list_kv == [6, 3, 4]
    assert (metadata.max_q_len, metadata.max_kv_len) == (1, 6)


def test_padded_rows_stay_in_the_null_block_at_different_slots():
    kv_cache, builder = make_builder(buckets=(2, 8))
    make_rows(kv_cache, (5, 2, 3))
    inputs = builder.build(Batch(rows=make_rows(kv_cache, (5, 2, 3), computed=1, num_tokens=1)))
    metadata = inputs.forward_metadata
    assert len(inputs.input_ids) == 8
    assert metadata.actual_seq_lengths_q.tolist() == [1] * 8
    assert metadata.actual_seq_lengths_kv.tolist() == [6, 3, 4, 1, 1, 1, 1, 1]
    assert not metadata.block_table["full_attention"][3:].any()
    padded = metadata.slot_mapping["full_attention"][3:].tolist()
    assert padded == [0, 1, 2, 3, 0]
    assert metadata.logits_indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("num_requests", "size"), [(1, 2), (2, 2), (3, 8), (9, 9)])
def test_bucket_is_the_smallest_that_holds_the_batch(num_requests, size):
    assert Eager(batch_buckets=[8, 2]).padded_size(num_requests) == size


def test_only_rows_that_sample_have_logits():
    kv_cache, builder = make_builder()
    rows = make_rows(kv_cache, (5, 2))
    rows[0] = BatchRow(
        request=rows[0].request,
        num_computed_tokens=0,
        num_scheduled_tokens=3,
        is_prefill=True,
        samples=False,
        next_prompt_token=3,
    )
    metadata = builder.build(Batch(rows=rows)).forward_metadata
    assert metadata.logits_indices.tolist() == [4]
