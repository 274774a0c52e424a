"""The memory of a simulated rank and the model that computes on it.

A token leaves its id at its place in the KV cache, in every lane. A prefill rank has one lane, a
decode rank one for each prefill rank that holds heads of its; so what a row sees tells whether all
of its KV is there, and whose it is.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from inferkit.core.batch import Batch, BatchRow
from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.step_output import StepOutput
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_cache.single_type_manager import SingleTypeKVCacheManager
from tests.kv_transfer.sim_requests import BLOCK_SIZE, MAX_KV_LEN, Violation, predict

MAX_MODEL_LEN = MAX_KV_LEN + 1


def make_kv_cache(
    *,
    windows: Sequence[int | None],
    num_blocks: int,
    max_num_requests: int,
    has_prefix_cache: bool = False,
) -> KVCacheManager:
    """`num_blocks` usable blocks of each kind."""
    return KVCacheManager(
        specs=[_spec(idx, window) for idx, window in enumerate(windows)],
        max_model_len=MAX_MODEL_LEN,
        max_num_requests=max_num_requests,
        free_bytes=1 << 30,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + 1,
        enable_prefix_cache=has_prefix_cache,
    )


def _spec(layer_idx: int, window: int | None) -> CacheSpec:
    kind = CacheKind.FULL if window is None else CacheKind.SLIDING_WINDOW
    return CacheSpec(
        layer_idx=layer_idx,
        kind=kind,
        manager_key=kind.value,
        num_heads=1,
        dims=(8, 8),
        dtype="float32",
        block_size=BLOCK_SIZE,
        window=window,
    )


class SimModel:
    """The engine of a scheduler."""

    def __init__(self, kv_cache: KVCacheManager, num_lanes: int) -> None:
        self.kv_cache = kv_cache
        self.is_blind = num_lanes == 0
        """A rank that has padded heads only: no KV of a prompt reaches it."""
        self.memory: dict[str, npt.NDArray[np.int64]] = {
            key: np.full((manager.pool.num_blocks, BLOCK_SIZE, 1, max(1, num_lanes)), -1, np.int64)
            for key, manager in kv_cache.managers.items()
        }

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The same memory, as a host store sees it."""
        return {key: [torch.from_numpy(memory)] for key, memory in self.memory.items()}

    def forward_batch(self, batch: Batch) -> StepOutput:
        next_tokens = {}
        for row in batch.rows:
            end = row.num_computed_tokens + row.num_scheduled_tokens
            self.check(row.request_id, row.request.token_ids(0, end), row.num_computed_tokens)
            self._write(row, end)
            if row.samples:
                next_tokens[row.request_id] = [predict(row.request.token_ids(0, end))]
        return StepOutput(next_tokens=next_tokens, inference_time=0.0)

    def check(self, request_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """The cache holds what the next query sees of the first `num_computed` tokens."""
        for key, manager in self.kv_cache.managers.items():
            window = getattr(manager, "window", None)
            first = 0 if window is None else max(0, num_computed - window + 1)
            if first >= num_computed or self.is_blind:
                continue
            blocks = self._blocks(manager, request_id, first, num_computed)
            seen = self.memory[key][blocks].reshape(-1, self.memory[key].shape[-1])
            start = first - first // BLOCK_SIZE * BLOCK_SIZE
            seen = seen[start : start + num_computed - first]
            wanted = np.array(token_ids[first:num_computed])[:, None]
            if 0 in blocks or not (seen == wanted).all():
                raise Violation(
                    f"request {request_id} computes on KV of others: {key} blocks {blocks} hold "
                    f"{seen.tolist()}, its tokens {first}.. are {wanted.ravel().tolist()}"
                )

    def _write(self, row: BatchRow, end: int) -> None:
        start = row.num_computed_tokens
        token_ids = row.token_ids
        for key, manager in self.kv_cache.managers.items():
            blocks = self._blocks(manager, row.request_id, 0, end)
            memory = self.memory[key]
            for position, token_id in enumerate(token_ids, start):
                block = blocks[position // BLOCK_SIZE]
                if block:
                    memory[block, position % BLOCK_SIZE] = token_id

    @staticmethod
    def _blocks(
        manager: SingleTypeKVCacheManager, request_id: int, first: int, end: int
    ) -> list[int]:
        return manager.block_ids(request_id)[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
