"""Runs batches: inputs -> forward -> sampling. Knows no queues and no text."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from inferkit.core.batch import Batch, BatchRow, dummy_batch
from inferkit.core.request import TokenLogprobs
from inferkit.core.step_output import StepOutput
from inferkit.engine.context_parallel import ContextParallelInputBuilder
from inferkit.engine.inputs import InputBuilder
from inferkit.engine.model_worker import ModelWorker
from inferkit.engine.sampler import Sampler, SamplerOutput
from inferkit.kv_cache.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 128


class ExecutionEngine:
    """Start in this order: construct, `init` (loads weights), `init_cache`, `warm_up`.

    Args:
        worker: the rank's model.
        max_model_len: longest request in tokens.
        warm_up: whether `warm_up` does anything.
    """

    def __init__(
        self, *, worker: ModelWorker, sampler: Sampler, max_model_len: int, warm_up: bool = True
    ) -> None:
        self.worker = worker
        self.sampler = sampler
        self.max_model_len = max_model_len
        self.warm_up_enabled = warm_up
        self._inputs: InputBuilder | None = None

    def init(self) -> None:
        """Build and load the model."""
        self.worker.init()
        self.cache_specs = self.worker.cache_specs(self.max_model_len)

    def init_cache(
        self, kv_cache: KVCacheManager, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        """Allocate the pools that the manager sized, and read its tables from now on.

        `allocate`: see `ModelWorker.init_kvcache`.
        """
        self.worker.init_kvcache(self.cache_specs, kv_cache.num_blocks, allocate)
        comm = self.worker.ctx.comm
        builder = ContextParallelInputBuilder if comm.layout.cp_size > 1 else InputBuilder
        self._inputs = builder(
            kv_cache=kv_cache,
            platform=self.worker.platform,
            dtype=self.worker.ctx.dtype_name,
            exe_mode=self.worker.exe_mode,
            comm=comm,
        )

    def warm_up(self, *, max_tokens: int, max_num_requests: int) -> None:
        """One dummy prefill, compilation, one dummy decode; only the null block is touched."""
        if not self.warm_up_enabled:
            self.worker.compile_model()
            return
        num_tokens = max(1, min(WARM_UP_TOKENS, max_tokens, self.max_model_len - 1))
        self._run(dummy_batch(num_tokens=num_tokens), is_warm_up=True)
        self.worker.compile_model()
        if self.max_model_len > 1:
            self._run(
                dummy_batch(num_rows=max_num_requests, num_computed_tokens=1), is_warm_up=True
            )

    def forward_batch(self, batch: Batch) -> StepOutput:
        """Run one step and sample the rows that end in a new token.

        Every TP rank must enter, also with a dummy batch, whose result is discarded.
        """
        timer = self.worker.ctx.comm.timer
        before_s = timer.seconds
        output = self._run(batch)
        return replace(output, collective_time=timer.seconds - before_s)

    def expert_load(self) -> dict[int, list[int]] | None:
        """Layer -> tokens that each expert was chosen for, over all ranks, since the start.

        Warm-up, padding and dummy batches are left out. None for a model without experts. Every
        rank must call this.
        """
        counts = self.worker.expert_counts()
        if not counts:
            return None
        comm = self.worker.ctx.comm
        total = comm.world.all_reduce(torch.stack(list(counts.values())).cpu())
        return dict(zip(counts, total.tolist(), strict=True))

    def _run(self, batch: Batch, *, is_warm_up: bool = False) -> StepOutput:
        assert self._inputs is not None, "init_cache() comes before the first batch"
        model_inputs = self._inputs.build(batch, is_warm_up=is_warm_up)
        logits_SV, seconds = self.worker.inference(model_inputs, batch.is_prefill)
        if batch.is_dummy:
            return StepOutput(next_tokens={}, inference_time=seconds, inference_time_main=seconds)
        rows = [row for row in batch.rows if row.samples]
        sampled = self._sample(logits_SV, rows)
        return StepOutput(
            next_tokens={
                row.request_id: [token_id]
                for row, token_id in zip(rows, sampled.token_ids, strict=True)
            },
            logprobs={
                row.request_id: [entry]
                for row, entry in zip(rows, sampled.logprobs, strict=True)
                if entry is not None
            },
            logits=logits_SV,
            inference_time=seconds,
            inference_time_main=seconds,
        )

    def _sample(self, logits_SV: torch.Tensor, rows: list[BatchRow]) -> SamplerOutput:
        """Tokens of the rows. One rank of each DP rank draws and tells the others, so that they
        stay alike; only it has logprobs."""
        comm = self.worker.ctx.comm
        if comm.layout.attn_tp_size == 1:
            return self.sampler.sample(logits_SV, rows)
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if comm.is_dp_leader:
            sampled = self.sampler.sample(logits_SV, rows)
            token_ids, logprobs = torch.tensor(sampled.token_ids), sampled.logprobs
        token_ids = comm.group("tp_cpu_group").broadcast(token_ids)
        return SamplerOutput(token_ids=token_ids.tolist(), logprobs=logprobs)
