"""Model inputs of a step in which ranks compute their prompts together (context parallelism).

Legend: q = tokens of a row in this step, c = tokens of it that were computed before.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inferkit.core.batch import Batch, BatchRow
from inferkit.core.forward_metadata import ForwardMetaData
from inferkit.engine.inputs import InputBuilder, ModelInputs
from inferkit.kv_cache.sizing import CacheGroup
from inferkit.layers.context_parallel import ContextParallelMetaData, ContextParallelPlan

Ints = npt.NDArray[np.int64]
HEADER_LEN = 4


@dataclass(frozen=True, kw_only=True)
class SharedRow:
    """A prompt row that all ranks compute together."""

    owner: int
    num_computed: int
    prompt_len: int
    samples: bool
    token_ids: Ints
    """[q]."""

    def segments(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """[start, end) of the row's tokens that a rank computes; empty ones are left out."""
        num_tokens = len(self.token_ids)
        size = -(-num_tokens // (2 * num_ranks))
        found = []
        for idx in (rank, 2 * num_ranks - 1 - rank):
            start, end = min(idx * size, num_tokens), min((idx + 1) * size, num_tokens)
            if end > start:
                found.append((start, end))
        return found

    def first_visible(self, window: int | None) -> int:
        """The first cached position that a query of the row sees."""
        return 0 if window is None else max(0, self.num_computed - window + 1)


class ContextParallelInputBuilder(InputBuilder):
    """As its base where no rank has prompt tokens; every rank must enter `build`."""

    def build(self, batch: Batch, *, is_warm_up: bool = False) -> ModelInputs:
        group = self.comm.group("cp_group")
        own = [row for row in batch.rows if row.is_prefill]
        decodes = [row for row in batch.rows if not row.is_prefill]
        message = _encode(own)
        num_sampled = sum(row.samples for row in batch.rows)
        sizes = torch.tensor([[len(message), len(decodes), num_sampled]])
        facts = self.comm.group("dp_group").all_gather(sizes).tolist()
        if not any(size for size, _, _ in facts):
            return super().build(batch, is_warm_up=is_warm_up)
        messages = self.comm.group("dp_group").all_gather_rows(
            torch.from_numpy(message), [size for size, _, _ in facts]
        )
        rows: list[SharedRow] = []
        start = 0
        for owner, (size, _, _) in enumerate(facts):
            rows += _decode(owner, messages[start : start + size].numpy())
            start += size
        parts = [[row.segments(rank, group.size) for row in rows] for rank in range(group.size)]
        mine = [
            (row, first, end)
            for row, segments in zip(rows, parts[group.rank], strict=True)
            for first, end in segments
        ]
        num_local = [
            sum(end - first for segments in part for first, end in segments) for part in parts
        ]
        num_prefill = num_local[group.rank]
        # A rank without a token of its own still enters every collective, with a padding row.
        is_idle = [not n and not num for n, (_, num, _) in zip(num_local, facts, strict=True)]
        num_padding = int(is_idle[group.rank])

        decode_ids = [row.token_ids[0] for row in decodes] + [0] * num_padding
        decode_positions = [row.num_computed_tokens for row in decodes] + [0] * num_padding
        decode_prompts = [row.request.num_prompt_tokens for row in decodes] + [0] * num_padding
        if batch.is_dummy:
            decode_prompts = [0] * len(decode_ids)
        table_rows = np.zeros(len(decode_ids), np.int64)
        table_rows[: len(decodes)] = self.kv_cache.rows([row.request_id for row in decodes])
        positions = [np.arange(first, end) + row.num_computed for row, first, end in mine]
        prompts = [np.full(end - first, row.prompt_len) for row, first, end in mine]
        ids = [row.token_ids[first:end] for row, first, end in mine]
        q_lens = np.array([end - first for _, first, end in mine] + [1] * len(decode_ids), np.int64)
        kv_lens = np.array(
            [row.num_computed + end for row, _, end in mine] + [p + 1 for p in decode_positions],
            np.int64,
        )
        decode_kv_lens = np.array(decode_positions, np.int64) + 1
        plans = {
            cache.manager_key: self._plan(
                cache,
                own,
                rows,
                parts,
                num_local,
                mine,
                decode_kv_lens=decode_kv_lens,
                table_rows=table_rows,
            )
            for cache in self.kv_cache.groups
        }
        kv_lens_R = self._tensor(kv_lens)
        metadata = ForwardMetaData(
            is_prefill=True,
            kv_len=kv_lens_R - 1,
            actual_seq_lengths_q=self._tensor(q_lens),
            actual_seq_lengths_kv=kv_lens_R,
            actual_seq_lengths_cu_q=self._tensor(np.cumsum(q_lens)),
            actual_seq_lengths_cu_kv=self._tensor(np.cumsum(kv_lens)),
            actual_seq_lengths_list_q=q_lens.tolist(),
            actual_seq_lengths_list_kv=kv_lens.tolist(),
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
            prompt_tokens=num_prefill,
            prompt_len=self._tensor(_join([*prompts, np.array(decode_prompts, np.int64)])),
            logits_indices=self._tensor(np.zeros(0, np.int64)),
            block_table=None,
            slot_mapping=None,
            attention_plans=plans,
            is_warm_up=is_warm_up,
            dp_num_tokens=tuple(
                n + num + idle
                for n, (_, num, _), idle in zip(num_local, facts, is_idle, strict=True)
            ),
            dp_num_sampled=tuple(sampled for _, _, sampled in facts),
            dp_is_prefill=True,
            cp_metadata=self._metadata(rows, parts, num_prefill, [r.samples for r in decodes]),
        )
        return ModelInputs(
            self._tensor(_join([*ids, np.array(decode_ids, np.int64)])),
            self._tensor(_join([*positions, np.array(decode_positions, np.int64)])),
            metadata,
        )

    def _plan(
        self,
        cache: CacheGroup,
        own: list[BatchRow],
        rows: list[SharedRow],
        parts: list[list[list[tuple[int, int]]]],
        num_local: list[int],
        mine: list[tuple[SharedRow, int, int]],
        *,
        decode_kv_lens: Ints,
        table_rows: Ints,
    ) -> ContextParallelPlan:
        """Where each row's keys are among the gathered ones, for one attention type."""
        group = self.comm.group("cp_group")
        contexts = [
            row.num_computed - row.first_visible(cache.window) if row.num_computed else 0
            for row in rows
        ]
        rows_per_rank = [
            num_local[rank]
            + sum(n for row, n in zip(rows, contexts, strict=True) if row.owner == rank)
            for rank in range(group.size)
        ]
        # tables[i][p] is the gathered index of position p of row i.
        tables = [np.zeros(row.num_computed + len(row.token_ids), np.int64) for row in rows]
        base = 0
        for rank in range(group.size):
            index = base
            for row, table, segments in zip(rows, tables, parts[rank], strict=True):
                for first, end in segments:
                    place = slice(row.num_computed + first, row.num_computed + end)
                    table[place] = np.arange(index, index + end - first)
                    index += end - first
            for row, table, num_context in zip(rows, tables, contexts, strict=True):
                if row.owner == rank:
                    place = slice(row.num_computed - num_context, row.num_computed)
                    table[place] = np.arange(index, index + num_context)
                    index += num_context
            base += rows_per_rank[rank]

        own_tables = [
            (row, table, num_context)
            for row, table, num_context in zip(rows, tables, contexts, strict=True)
            if row.owner == group.rank
        ]
        own_table_rows = self.kv_cache.rows([row.request_id for row in own])
        manager = self.kv_cache.managers[cache.manager_key]
        context_slots, own_rows, own_slots = [], [], []
        for (row, table, num_context), table_row in zip(own_tables, own_table_rows, strict=True):
            seen = np.arange(row.num_computed - num_context, len(table))
            slots = manager.slot_mapping(np.full(len(seen), table_row, np.int64), seen)
            context_slots.append(slots[:num_context])
            own_slots.append(slots[num_context:])
            own_rows.append(table[row.num_computed :])

        width = max((row.num_computed + end for row, _, end in mine), default=1)
        block_table = np.zeros((len(mine), width), np.int32)
        by_row = {id(row): table for row, table in zip(rows, tables, strict=True)}
        for idx, (row, _, end) in enumerate(mine):
            kv_len = row.num_computed + end
            block_table[idx, :kv_len] = by_row[id(row)][:kv_len]
        decode = None
        if len(decode_kv_lens):
            slots = manager.slot_mapping(table_rows, decode_kv_lens - 1)
            decode = self.platform.cache.plan(
                dtype=self.dtype,
                block_size=cache.block_size,
                window=cache.window,
                q_lens=np.ones_like(decode_kv_lens),
                kv_lens=decode_kv_lens,
                block_table=self.kv_cache.block_tables(table_rows)[cache.manager_key],
                slots=self._tensor(slots),
            )
        return ContextParallelPlan(
            group=group,
            num_prefill=num_local[group.rank],
            context_slots=self._tensor(_join(context_slots)),
            rows_per_rank=tuple(rows_per_rank),
            own_rows=self._tensor(_join(own_rows)),
            own_slots=self._tensor(_join(own_slots)),
            prefill=self.platform.cache.plan(
                dtype=self.dtype,
                block_size=1,
                window=cache.window,
                q_lens=np.array([end - first for _, first, end in mine], np.int64),
                kv_lens=np.array([row.num_computed + end for row, _, end in mine], np.int64),
                block_table=block_table,
                slots=self._tensor(np.zeros(0, np.int64)),
            ),
            decode=decode,
        )

    def _metadata(
        self,
        rows: list[SharedRow],
        parts: list[list[list[tuple[int, int]]]],
        num_prefill: int,
        decode_samples: list[bool],
    ) -> ContextParallelMetaData:
        group = self.comm.group("cp_group")
        last_tokens: list[int] = []
        counts: list[int] = []
        picked: dict[int, int] = {}
        for rank, part in enumerate(parts):
            index, count = 0, 0
            for idx, (row, segments) in enumerate(zip(rows, part, strict=True)):
                for first, end in segments:
                    index += end - first
                    if end == len(row.token_ids) and row.samples:
                        picked[idx] = sum(counts) + count
                        count += 1
                        if rank == group.rank:
                            last_tokens.append(index - 1)
            counts.append(count)
        own = [
            picked[idx] for idx, row in enumerate(rows) if row.owner == group.rank and row.samples
        ]
        decode_tokens = num_prefill + np.flatnonzero(np.array(decode_samples, bool))
        return ContextParallelMetaData(
            group=group,
            last_tokens=self._tensor(np.array(last_tokens, np.int64)),
            rows_per_rank=tuple(counts),
            own_rows=self._tensor(np.array(own, np.int64)),
            decode_tokens=self._tensor(decode_tokens),
        )


def _join(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _encode(rows: list[BatchRow]) -> Ints:
    """[q, c, prompt length, samples, token ids ...] of each row."""
    return _join(
        [
            np.array(
                [
                    row.num_scheduled_tokens,
                    row.num_computed_tokens,
                    row.request.num_prompt_tokens,
                    row.samples,
                    *row.token_ids,
                ],
                np.int64,
            )
            for row in rows
        ]
    )


def _decode(owner: int, message: Ints) -> list[SharedRow]:
    rows, start = [], 0
    while start < len(message):
        num_tokens, num_computed, prompt_len, samples = message[start : start + HEADER_LEN].tolist()
        start += HEADER_LEN
        rows.append(
            SharedRow(
                owner=owner,
                num_computed=num_computed,
                prompt_len=prompt_len,
                samples=bool(samples),
                token_ids=message[start : start + num_tokens],
            )
        )
        start += num_tokens
    return rows
