"""From a batch to the model's tensors: vectorised, once per step, without waiting for a device.

Legend: T = packed tokens, R = rows, S = sampled rows; p = with padding.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inferkit.core.batch import Batch
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.engine.exe_mode import Eager
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.layers.attention import CONTIGUOUS_KEY
from inferkit.parallel.comm_manager import CommManager
from inferkit.platforms.base import Platform


@dataclass(frozen=True)
class ModelInputs:
    input_ids: torch.Tensor
    """[Tp] int64."""
    position_ids: torch.Tensor
    """[Tp] int64."""
    forward_metadata: ForwardMetaData


class InputBuilder:
    """Builds packed inputs; block tables and slots come from the KV cache manager."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        platform: Platform,
        dtype: str,
        exe_mode: Eager,
        comm: CommManager | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.platform = platform
        self.dtype = dtype
        self.exe_mode = exe_mode
        self.comm = comm or CommManager()

    def build(self, batch: Batch, *, is_warm_up: bool = False) -> ModelInputs:
        rows = batch.rows
        input_ids = np.array([t for row in rows for t in row.token_ids], np.int64)
        q_lens = np.array([row.num_scheduled_tokens for row in rows], np.int64)
        kv_lens = q_lens + np.array([row.num_computed_tokens for row in rows], np.int64)
        prompt_lens = np.array([row.request.num_prompt_tokens for row in rows], np.int64)
        prompt_lens = np.repeat(prompt_lens * (not batch.is_dummy), q_lens)
        table_rows = self.kv_cache.rows([row.request_id for row in rows])
        positions = _ranges(kv_lens - q_lens, q_lens)
        slots = self.kv_cache.slot_mappings(np.repeat(table_rows, q_lens), positions)
        ends = np.cumsum(q_lens)
        samples = np.array([row.samples for row in rows], bool)
        prompt_tokens = int(q_lens[[row.is_prefill for row in rows]].sum())

        num_padding = 0
        if not batch.is_prefill:
            num_padding = self.exe_mode.padded_size(len(rows)) - len(rows)
        if num_padding:
            ones, zeros = np.ones(num_padding, np.int64), np.zeros(num_padding, np.int64)
            input_ids = np.concatenate((input_ids, zeros))
            positions = np.concatenate((positions, zeros))
            q_lens, kv_lens = np.concatenate((q_lens, ones)), np.concatenate((kv_lens, ones))
            table_rows = np.concatenate((table_rows, zeros))
            prompt_lens = np.concatenate((prompt_lens, zeros))
            for key, manager in self.kv_cache.managers.items():
                in_null_block = np.arange(num_padding) % manager.block_size
                slots[key] = np.concatenate((slots[key], in_null_block))

        dp_counts = self._dp_counts(len(input_ids), int(samples.sum()), batch.is_prefill)
        tables = self.kv_cache.block_tables(table_rows)
        device_slots = {key: self._tensor(values) for key, values in slots.items()}
        plans = {
            group.manager_key: self.platform.cache.plan(
                dtype=self.dtype,
                block_size=group.block_size,
                window=group.window,
                q_lens=q_lens,
                kv_lens=kv_lens,
                block_table=tables[group.manager_key],
                slots=device_slots[group.manager_key],
            )
            for group in self.kv_cache.groups
        }
        is_contiguous = CONTIGUOUS_KEY in plans
        kv_lens_R = self._tensor(kv_lens)
        metadata = ForwardMetaData(
            is_prefill=batch.is_prefill,
            kv_len=kv_lens_R - 1,
            actual_seq_lengths_q=self._tensor(q_lens),
            actual_seq_lengths_kv=kv_lens_R,
            actual_seq_lengths_cu_q=self._tensor(np.cumsum(q_lens)),
            actual_seq_lengths_cu_kv=self._tensor(np.cumsum(kv_lens)),
            actual_seq_lengths_list_q=q_lens.tolist(),
            actual_seq_lengths_list_kv=kv_lens.tolist(),
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
            prompt_tokens=prompt_tokens,
            prompt_len=self._tensor(prompt_lens),
            logits_indices=self._tensor(ends[samples] - 1),
            block_table=None
            if is_contiguous
            else {key: self._tensor(table) for key, table in tables.items()},
            slot_mapping=None if is_contiguous else device_slots,
            attention_plans=plans,
            cache_rows=self._tensor(tables[CONTIGUOUS_KEY][:, 0].astype(np.int64))
            if is_contiguous
            else None,
            is_warm_up=is_warm_up,
            dp_num_tokens=None if dp_counts is None else tuple(dp_counts[:, 0].tolist()),
            dp_num_sampled=None if dp_counts is None else tuple(dp_counts[:, 1].tolist()),
            dp_is_prefill=batch.is_prefill if dp_counts is None else bool(dp_counts[:, 2].any()),
        )
        return ModelInputs(self._tensor(input_ids), self._tensor(positions), metadata)

    def _dp_counts(
        self, num_tokens: int, num_sampled: int, is_prefill: bool
    ) -> torch.Tensor | None:
        """[DP ranks, 3] of these figures, where DP ranks compute together."""
        if not self.comm.joins_dp_ranks:
            return None
        own = torch.tensor([[num_tokens, num_sampled, is_prefill]])
        return self.comm.group("dp_group").all_gather(own)

    def _tensor(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.platform.device)


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start_0 .. start_0 + length_0 - 1, start_1 ..., as one array."""
    offsets = np.cumsum(lengths) - lengths
    result: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(
        starts - offsets, lengths
    )
    return result
