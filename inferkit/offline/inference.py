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
from pathlib import Path
from typing import Any

from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import InferkitError, RequestError
from inferkit.core.protocols import Clock
from inferkit.core.request import FinishReason, Request
from inferkit.core.sampling_params import MAX_SEED, SamplingParams
from inferkit.offline.output_processor import OutputProcessor
from inferkit.offline.prompts import Prompt, render_prompt
from inferkit.offline.result import GenerationResult
from inferkit.runtime.assembly import assemble
from inferkit.scheduler.step_record import StepRecord

logger = logging.getLogger(__name__)

OnStep = Callable[[StepRecord, int], None]
"""Called after each step with its record and the number of requests finished so far."""


class OfflineInference:
    """One rank's offline loop. Construction loads the model; `generate` may be called repeatedly.

    Args:
        config: from `load_config` (automatic values resolved).
        run_dir: where profiler traces go.
        progress, stage: see `assemble`.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        clock: Clock = time.monotonic,
        run_dir: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        stage: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.parts = assemble(config, clock=clock, run_dir=run_dir, progress=progress, stage=stage)
        self.step_records: list[StepRecord] = []
        """Steps of the last `generate`."""
        self.requests: list[Request] = []
        """Requests of the last `generate`, in the order of its prompts."""
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep = lambda record, num_finished: None,
    ) -> list[GenerationResult]:
        """Generate for every prompt; no prompt is dropped, results keep the order.

        Args:
            prompts: text to complete, a list of chat messages, or token ids; one or many.
            sampling_params: for all prompts, or one for each (None = the `data` node's values).
            on_step: called after each step.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was generated.
        """
        many = _as_list(prompts)
        params = self._sampling_params(sampling_params, len(many))
        processor = OutputProcessor(self.parts.tokenizer)
        self.requests = [
            self._make_request(prompt, param) for prompt, param in zip(many, params, strict=True)
        ]
        self.step_records = []
        scheduler = self.parts.scheduler
        try:
            for request, prompt in zip(self.requests, many, strict=True):
                scheduler.add_request(request)
                processor.add(request, prompt)
            while scheduler.has_work:
                self._step(processor, on_step)
        finally:
            for request in self.requests:
                scheduler.abort(request.request_id)
                scheduler.forget(request.request_id)
        return [processor.result(request) for request in self.requests]

    def _step(self, processor: OutputProcessor, on_step: OnStep) -> None:
        scheduler = self.parts.scheduler
        result = scheduler.run_step(self.parts.engine)
        if result is None:
            raise InferkitError(
                f"{len(scheduler.waiting_queue)} requests wait but none can run "
                f"(kv {self.parts.kv_cache.format_usage()}); are blocks pinned?"
            )
        for request_id, token_ids in result.new_tokens.items():
            if processor.process(request_id, token_ids):
                scheduler.finish_request(request_id, FinishReason.STOP)
        self.step_records.append(result.record)
        on_step(result.record, len(scheduler.finished_requests))

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
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
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED)
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
