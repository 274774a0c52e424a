"""Small stand-ins for what a unit under test is given: an engine with a memory, a clock."""

import zlib

import numpy as np

from inferkit.core.batch import Batch, BatchRow
from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.request import Request
from inferkit.core.sampling_params import SamplingParams
from inferkit.core.step_output import StepOutput
from inferkit.kv_cache.kv_cache_manager import KVCacheManager


def make_spec(*, window: int | None = None, block_size: int = 4, layer_idx: int = 0) -> CacheSpec:
    kind = CacheKind.FULL if window is None else CacheKind.SLIDING_WINDOW
    return CacheSpec(
        layer_idx=layer_idx,
        kind=kind,
        manager_key=kind.value,
        num_heads=1,
        dims=(8, 8),
        dtype="float32",
        block_size=block_size,
        window=window,
    )


def make_request(request_id: int, prompt_len: int, max_tokens: int | None = None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[100 + request_id * 7 + i for i in range(prompt_len)],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        seed=0,
    )


class FakeClock:
    """Advances by one millisecond each time it is asked."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def next_token(history: list[int]) -> int:
    """The token that the fake model predicts after `history`: any change of history changes it."""
    return zlib.crc32(np.array(history, np.int64).tobytes()) % 50_000 + 1_000


class MemoryEngine:
    """Predicts from what it finds in a real block layout, so a wrong block gives a wrong token.

    Each slot stores the token id that was written to it; attention reads the context of a row
    through its block table, and the step's own tokens directly, as the platform's cache does.
    """

    def __init__(self, kv_cache: KVCacheManager, eos_after: dict[int, int] | None = None) -> None:
        self.kv_cache = kv_cache
        self.eos_after = eos_after or {}
        self.batches: list[Batch] = []
        self.memory = {
            key: np.full(manager.pool.num_blocks * manager.block_size, -1, np.int64)
            for key, manager in kv_cache.managers.items()
        }

    def forward_batch(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        next_tokens = {}
        for row in batch.rows:
            history = self._read_and_write(row)
            if row.samples and not batch.is_dummy:
                request = row.request
                num_output = len(request.output_token_ids) + 1
                is_eos = self.eos_after.get(row.request_id) == num_output
                next_tokens[row.request_id] = [2 if is_eos else next_token(history)]
        return StepOutput(next_tokens=next_tokens, inference_time=0.001)

    def _read_and_write(self, row: BatchRow) -> list[int]:
        """Returns the tokens that the row's last query sees."""
        num_computed, token_ids = row.num_computed_tokens, row.token_ids
        end = num_computed + len(token_ids)
        history: list[int] = []
        for key, manager in self.kv_cache.managers.items():
            table_row = np.full(end, self.kv_cache.rows([row.request_id])[0])
            slots = manager.slot_mapping(table_row, np.arange(end))
            memory = self.memory[key]
            window = getattr(manager, "window", None)
            first = 0 if window is None else max(0, num_computed - window + 1)
            seen = memory[slots[first:num_computed]].tolist() + token_ids
            memory[slots[num_computed:]] = token_ids
            known = row.request.token_ids(first, end)
            assert row.request_id < 0 or seen == known, f"{key}: request {row.request_id}"
            history = max(history, seen if window is None else seen[-window:], key=len)
        return history
