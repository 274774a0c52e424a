"""Offline inference in this process: prompts in, results out.

from inferkit import OfflineInference, SamplingParams, load_config
llm = OfflineInference(load_config(["scheduler.batch_size=4"]))
results = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
print(results[0].text)
"""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from inferkit.config.schema import InferenceConfig
from inferkit.core.batch import dummy_batch
from inferkit.core.errors import InferkitError, RequestError
from inferkit.core.place import RankPlace
from inferkit.core.protocols import Clock
from inferkit.core.request import FinishReason, Request
from inferkit.core.sampling_params import MAX_SEED, SamplingParams, request_seed
from inferkit.offline.output_processor import OutputProcessor
from inferkit.offline.prompts import Prompt, render_prompt
from inferkit.offline.result import GenerationResult, OnResult
from inferkit.runtime.assembly import assemble
from inferkit.scheduler.step_record import StepRecord

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
OnStep = Callable[[StepRecord, int], None]
"""Called after each step with its record and the number of requests finished so far."""


class OfflineInference:
    """One rank's offline loop. Construction loads the model; `generate` may be called repeatedly.

    With several ranks each constructs one and calls `generate` with the same arguments. The DP
    ranks share the prompts out; every rank returns all results.

    Args:
        config: from `load_config` (automatic values resolved).
        place: of this process among the ranks; None = from the variables of torchrun or srun,
            else it is the only one.
        run_dir: where profiler traces go.
        progress, stage: see `assemble`.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        clock: Clock = time.monotonic,
        place: RankPlace | None = None,
        run_dir: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        stage: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.parts = assemble(
            config, clock=clock, place=place, run_dir=run_dir, progress=progress, stage=stage
        )
        self.step_records: list[StepRecord] = []
        """Steps of the last `generate` on this DP rank; on all of them once it has returned."""
        self.requests: list[Request] = []
        """Requests of the last `generate`, in the order of its prompts."""
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep = lambda record, num_finished: None,
        on_result: OnResult = lambda result: None,
    ) -> list[GenerationResult]:
        """Generate for every prompt; no prompt is dropped, results keep the order.

        Args:
            prompts: text to complete, a list of chat messages, or token ids; one or many.
            sampling_params: for all prompts, or one for each (None = the `data` node's values).
            on_step, on_result: see their types.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was generated.
        """
        many = _as_list(prompts)
        params = self._sampling_params(sampling_params, len(many))
        processor = OutputProcessor(self.parts.tokenizer)
        seeds = self._draw_seeds(params)
        self.requests = [
            self._make_request(prompt, param, seed)
            for prompt, param, seed in zip(many, params, seeds, strict=True)
        ]
        self.step_records = []
        scheduler, comm = self.parts.scheduler, self.parts.comm
        share = slice(comm.dp_rank, None, comm.layout.attn_dp_size)
        own = self.requests[share]
        results: dict[int, GenerationResult] = {}

        def take_finished() -> int:
            for request in list(scheduler.finished_requests.values()):
                result = processor.result(request)
                results[request.request_id] = result
                scheduler.forget(request.request_id)
                on_result(result)
            return len(results)

        try:
            for request, prompt in zip(own, many[share], strict=True):
                scheduler.add_request(request)
                processor.add(request, prompt)
            take_finished()  # requests that can never run
            while self._has_work():
                record = self._step(processor)
                num_finished = take_finished()
                if record is not None:
                    on_step(record, num_finished)
        finally:
            for request in own:
                scheduler.abort(request.request_id)
                scheduler.forget(request.request_id)
        return self._gather([results[request.request_id] for request in own])

    def _has_work(self) -> bool:
        """Whether this rank must take another step, be it only to let another one do so."""
        has_work, comm = self.parts.scheduler.has_work, self.parts.comm
        if not comm.joins_dp_ranks:
            return has_work
        return bool(comm.group("dp_group").max(has_work))

    def _step(self, processor: OutputProcessor) -> StepRecord | None:
        """Run one step; None = it was one for other ranks only."""
        scheduler = self.parts.scheduler
        result = scheduler.run_step(self.parts.engine)
        if result is None and scheduler.has_work:
            raise InferkitError(
                f"{len(scheduler.waiting_queue)} requests wait but none can run "
                f"(kv {self.parts.kv_cache.format_usage()}); are blocks pinned?"
            )
        if result is None:
            # Other DP ranks have work left and enter collectives: a missing rank dead-locks them.
            self.parts.engine.forward_batch(dummy_batch(num_computed_tokens=1))
            return None
        for request_id, token_ids in result.new_tokens.items():
            if processor.process(request_id, token_ids):
                scheduler.finish_request(request_id, FinishReason.STOP)
        record = replace(result.record, dp_rank=self.parts.comm.dp_rank)
        self.step_records.append(record)
        return record

    def _gather(self, results: list[GenerationResult]) -> list[GenerationResult]:
        """Results, requests and steps of all DP ranks, in the order of the prompts."""
        comm = self.parts.comm
        if comm.world.size == 1:
            return results
        share = (self.requests[comm.dp_rank :: comm.layout.attn_dp_size], results)
        own = (*share, self.step_records) if comm.is_dp_leader else None
        shares = [part for part in comm.world.all_gather_objects(own) if part is not None]
        self.requests = _interleave([part[0] for part in shares])
        self.step_records = [record for part in shares for record in part[2]]
        return _interleave([part[1] for part in shares])

    def _draw_seeds(self, params: Sequence[SamplingParams]) -> list[int]:
        """The seed of each request; one that gives none gets a drawn one, equal on all ranks."""
        run_seed = self.config.data.run_seed
        if run_seed is None:
            run_seed = secrets.randbelow(MAX_SEED)
        own = [request_seed(run_seed, index) for index in range(len(params))]
        drawn = self.parts.comm.world.broadcast(torch.tensor(own, dtype=torch.int64))
        return [
            seed if param.seed is None else param.seed
            for param, seed in zip(params, drawn.tolist(), strict=True)
        ]

    def _make_request(self, prompt: Prompt, params: SamplingParams, seed: int) -> Request:
        token_ids = render_prompt(self.parts.tokenizer, prompt)
        num_kept = min(len(token_ids), self.config.data.input_truncated_len)
        if num_kept < len(token_ids):
            logger.warning(
                "a prompt of %d tokens is cut to data.input_truncated_len=%d; its end is lost",
                len(token_ids),
                num_kept,
            )
        vocab_size = self.parts.arch.vocab_size
        for name, ids in (("prompt", token_ids), ("stop_token_ids", params.stop_token_ids)):
            wrong = [token_id for token_id in ids if token_id >= vocab_size]
            if wrong:
                raise RequestError(
                    f"{name}: token ids {wrong[:5]} are outside the model's vocabulary; allowed is "
                    f"0 to {vocab_size - 1}"
                )
        return Request(
            request_id=next(self._request_ids),
            prompt_token_ids=token_ids[:num_kept],
            num_truncated_tokens=len(token_ids) - num_kept,
            sampling=params,
            seed=seed,
        )

    def _sampling_params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if given is None:
            given = default_sampling_params(self.config)
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if len(given) != num_prompts:
            raise RequestError(
                f"{len(given)} sampling_params for {num_prompts} prompts; give one for all or "
                "one for each"
            )
        return list(given)


def default_sampling_params(config: InferenceConfig) -> SamplingParams:
    """What the `data` and `scheduler` nodes ask for."""
    data = config.data
    return SamplingParams(
        temperature=data.temperature,
        top_p=data.top_p,
        top_k=data.top_k,
        min_p=data.min_p,
        seed=data.seed,
        max_tokens=config.scheduler.max_new_tokens,
    )


def _interleave(shares: list[list[Item]]) -> list[Item]:
    """Undo `items[rank::num_ranks]`."""
    return [item for row in itertools.zip_longest(*shares) for item in row if item is not None]


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: text, a message list and a list of ids are each one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; allowed is text, a list of messages, a list of "
            "token ids, or a list of these"
        )
    many = list(prompts)
    if many and all(isinstance(item, dict | int) for item in many):
        return [many]
    return many
