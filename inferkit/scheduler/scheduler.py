"""Decides which requests run in the next step and keeps their state.

Sees the engine as a protocol and time as a callable; opens nothing, starts nothing. Every decision
depends on requests and blocks only, so all TP ranks that are given the same requests decide alike.
"""

import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from inferkit.core.batch import Batch, BatchRow, dummy_batch
from inferkit.core.errors import ConfigError, RequestError
from inferkit.core.protocols import Clock, Engine
from inferkit.core.request import FinishReason, Request, RequestState
from inferkit.core.step_output import StepOutput
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.scheduler.step_record import StepRecord

logger = logging.getLogger(__name__)

Phase = Literal["prefill", "decode"]

MAX_HEAD_SKIPS = 16
"""Steps in which smaller requests may pass a waiting head that lacks blocks."""
MAX_PASSERS = 32
"""Waiting requests that are tried in one step after one lacked blocks."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step changed."""

    record: StepRecord
    new_tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)


class Scheduler:
    """Prefill first, continuous batching, chunked prefill mixed with decode.

    waiting --admit--> prefilling --last chunk--> running --finish rule--> finished
       ^-------------------- preempt (blocks run short) ----'

    Every request is in exactly one of `waiting_queue`, `running_requests` (prefilling and
    running, in order of admission) and `finished_requests`.

    Rules where blocks run short: the oldest running request is never passed over, so it always
    advances; for it the youngest is preempted and computed again later. Any other running
    request skips the step. A waiting head may be passed by smaller requests `MAX_HEAD_SKIPS` times.

    Args:
        max_prefill_tokens: tokens of one step; without chunked prefill also the longest prompt.
        eos_token_ids: tokens that end a request unless it ignores them.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Clock,
        batch_size: int,
        max_new_tokens: int = 32,
        max_prefill_tokens: int = 2048,
        enable_chunked_prefill: bool = True,
        fixed_steps: bool = False,
        attn_dp_size: int = 1,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.max_num_requests = batch_size // attn_dp_size
        self.max_new_tokens = max_new_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.fixed_steps = fixed_steps
        if enable_chunked_prefill and max_prefill_tokens <= self.max_num_requests:
            raise ConfigError(
                f"scheduler.max_prefill_tokens={max_prefill_tokens} leaves no room for a prompt "
                f"beside {self.max_num_requests} decoding requests; set it to at least "
                f"{self.max_num_requests + 1} or lower scheduler.batch_size"
            )
        self._requests: dict[int, Request] = {}
        self.waiting_queue: deque[Request] = deque()
        self.running_requests: dict[int, Request] = {}
        self.finished_requests: dict[int, Request] = {}
        self.num_steps = 0
        self._num_preempted = 0

    # -- requests in and out -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something."""
        return bool(self.waiting_queue or self.running_requests)

    @property
    def has_handoffs(self) -> bool:
        """Whether `advance_queues` must come soon although there may be no work."""
        return False

    def hand_off_stats(self) -> dict[str, int]:
        """Plain numbers of requests that two instances share; {} where none are."""
        return {}

    @property
    def num_waiting(self) -> int:
        """Requests that are not computed yet, whatever they wait for."""
        return len(self.waiting_queue)

    @property
    def num_in_flight(self) -> int:
        """Requests that take a place of `max_num_requests`."""
        return len(self.running_requests)

    def request(self, request_id: int) -> Request:
        """A request that was added and not forgotten, wherever it is."""
        return self._requests[request_id]

    def add_request(self, request: Request) -> None:
        """Queue a request; one that can never run is finished at once with the reason.

        Raises:
            RequestError: the prompt is empty, or the id is in use.
        """
        if not request.prompt_token_ids:
            raise RequestError(f"request {request.request_id}: the prompt holds no token")
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id} is already known")
        limits = [
            request.sampling.max_tokens or self.max_new_tokens,
            self.max_model_len - request.num_prompt_tokens,
        ]
        if self.fixed_steps:
            limits.append(self.max_new_tokens)
        request.max_tokens = min(limits)
        request.arrival_time_s = request.arrival_time_s or self.clock()
        self._requests[request.request_id] = request
        refusal = self._refusal(request)
        if refusal is None:
            self._enqueue(request)
            return
        reason, request.finish_detail = refusal
        self._on_refused(request)
        logger.warning("request=%d refused: %s", request.request_id, request.finish_detail)
        self._set_finished(request, reason)

    def _refusal(self, request: Request) -> tuple[FinishReason, str] | None:
        num_prompt = request.num_prompt_tokens
        if num_prompt >= self.max_model_len:
            return FinishReason.PROMPT_TOO_LONG, (
                f"the prompt has {num_prompt} tokens; engine.max_model_len="
                f"{self.max_model_len} allows {self.max_model_len - 1} and one new token"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_prefill_tokens:
            return FinishReason.PROMPT_TOO_LONG, (
                f"the prompt has {num_prompt} tokens; scheduler.max_prefill_tokens="
                f"{self.max_prefill_tokens} is the limit without scheduler.enable_chunked_prefill"
            )
        if self.fixed_steps and num_prompt + self.max_new_tokens > self.max_model_len:
            return FinishReason.PROMPT_TOO_LONG, (
                f"the prompt has {num_prompt} tokens; with scheduler.fixed_steps all "
                f"{self.max_new_tokens} steps must fit into engine.max_model_len="
                f"{self.max_model_len}"
            )
        capacity_error = self.kv_cache.capacity_error(self._max_kv_len(request))
        return None if capacity_error is None else (FinishReason.REFUSED, capacity_error)

    def _max_kv_len(self, request: Request) -> int:
        """Tokens of a request that need a place in the cache, at most."""
        # The last token of an output needs none: nothing is computed from it.
        num_new = self.max_new_tokens if self.fixed_steps else request.max_tokens - 1
        return request.num_prompt_tokens + num_new

    def _enqueue(self, request: Request) -> None:
        self.waiting_queue.append(request)

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; finished and unknown ones stay as they are."""
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            self._finish(request, FinishReason.ABORT)

    def finish_request(self, request_id: int, reason: FinishReason) -> None:
        """End a request's output from outside, for instance where a stop string was met.

        It wins over the length limit that the same token may have reached.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason not in (None, FinishReason.LENGTH):
            return
        request.finish_reason = reason
        if request.valid_output_len is None:
            request.valid_output_len = len(request.output_token_ids)
        if not request.is_finished and self._is_done(request):
            self._finish(request, reason)

    # -- one step ------------------------------------------------------------------------------

    def advance_queues(self) -> dict[int, list[int]]:
        """Move requests between queues by what happened outside of steps; returns tokens that
        came without one. Every rank calls it once per tick, before `run_step`."""
        return {}

    def run_step(self, engine: Engine, phase: Phase | None = None) -> StepResult | None:
        """Schedule, run and account one step.

        With a `phase`, only that phase is scheduled, and without work for it a dummy batch runs,
        so that every rank enters the same collectives. Returns None when nothing ran for a
        request.
        """
        start_s, self._num_preempted = self.clock(), 0
        batch = self.schedule(phase)
        if batch is None:
            if phase is not None:
                # Every rank must enter forward_batch, also with a dummy batch: a missing rank
                # dead-locks the collective.
                engine.forward_batch(dummy_batch(num_computed_tokens=int(phase == "decode")))
            return None
        # Counted before process_output frees anything: the peak is what matters.
        kv_used, kv_usage = self.kv_cache.num_used_blocks, self.kv_cache.format_usage()
        output = engine.forward_batch(batch)
        new_tokens, finished = self.process_output(batch, output)
        num_prefill_tokens = sum(r.num_scheduled_tokens for r in batch.rows if r.is_prefill)
        record = StepRecord(
            step=self.num_steps,
            kind=_kind(num_prefill_tokens, batch.num_tokens),
            num_requests=len(batch.rows),
            num_tokens=batch.num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            kv_used=kv_used,
            kv_total=self.kv_cache.num_usable_blocks,
            num_waiting=self.num_waiting,
            num_running=len(self.running_requests),
            num_preempted=self._num_preempted,
            start_s=start_s,
            step_time_s=self.clock() - start_s,
            inference_time_s=output.inference_time,
            collective_time_s=output.collective_time,
        )
        self.num_steps += 1
        logger.info(
            "step=%d kind=%s requests=%d tokens=%d kv=%s waiting=%d running=%d%s ms=%.2f "
            "infer_ms=%.2f",
            record.step,
            record.kind,
            record.num_requests,
            record.num_tokens,
            kv_usage,
            record.num_waiting,
            record.num_running,
            "".join(f" {name}={num}" for name, num in self._queue_lengths().items()),
            record.step_time_s * 1e3,
            record.inference_time_s * 1e3,
        )
        return StepResult(record=record, new_tokens=new_tokens, finished=finished)

    def schedule(self, phase: Phase | None = None) -> Batch | None:
        """Choose rows and take their blocks; None when nothing can run.

        With chunked prefill one step serves all running requests and admits new ones with the
        tokens that are left. Without it a step is either prefill, which comes first, or decode.
        """
        if self.enable_chunked_prefill and phase is None:
            num_decodes = sum(request.is_decoding for request in self.running_requests.values())
            budget = self.max_prefill_tokens - num_decodes
            decode_rows, prefill_rows = self._schedule_running(budget, decodes=True)
            budget -= sum(row.num_scheduled_tokens for row in prefill_rows)
            rows = prefill_rows + self._schedule_waiting(budget) + decode_rows
            return Batch(rows=rows) if rows else None
        rows = []
        if phase != "decode":
            _, rows = self._schedule_running(self.max_prefill_tokens, decodes=False)
            budget = self.max_prefill_tokens - sum(row.num_scheduled_tokens for row in rows)
            rows += self._schedule_waiting(budget)
        if phase != "prefill" and not rows:
            rows, _ = self._schedule_running(0, decodes=True)
        return Batch(rows=rows) if rows else None

    def _schedule_running(
        self, token_budget: int, *, decodes: bool
    ) -> tuple[list[BatchRow], list[BatchRow]]:
        """Decode rows and next chunks of running requests, blocks taken in order of admission.

        In that order a preempted request, always the youngest, has no row in this step yet.
        """
        decode_rows: list[BatchRow] = []
        prefill_rows: list[BatchRow] = []
        for request in list(self.running_requests.values()):
            if request.request_id not in self.running_requests:
                continue  # preempted a moment ago
            if request.is_decoding:
                if decodes and self._allocate(request, 1):
                    decode_rows.append(self._row(request, 1))
                continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, token_budget)
            if num_tokens > 0 and self._allocate(request, num_tokens):
                prefill_rows.append(self._row(request, num_tokens))
                token_budget -= num_tokens
        return decode_rows, prefill_rows

    def _schedule_waiting(self, token_budget: int) -> list[BatchRow]:
        """First chunks of requests that are admitted in this step."""
        rows: list[BatchRow] = []
        if token_budget <= 0 or self.num_in_flight >= self.max_num_requests:
            return rows
        # A request that runs and will ask for another block must find one.
        num_growing = sum(map(self._will_grow, self.running_requests.values()))
        num_short = 0
        for position, request in enumerate(list(self.waiting_queue)):
            if token_budget <= 0 or self.num_in_flight >= self.max_num_requests:
                break
            num_tokens = self._admit(
                request, token_budget, is_first=not rows, num_growing=num_growing
            )
            if num_tokens is None:
                break
            if num_tokens > 0:
                rows.append(self._row(request, num_tokens))
                token_budget -= num_tokens
                num_growing += self._will_grow(request)
                continue
            request.num_skips += 1
            num_short += 1
            is_starved = position == 0 and request.num_skips > MAX_HEAD_SKIPS
            if is_starved or num_short > MAX_PASSERS:
                break
        return rows

    def _admit(
        self, request: Request, token_budget: int, *, is_first: bool, num_growing: int
    ) -> int | None:
        """Move a waiting request to running and take blocks for its first chunk.

        Returns the tokens of the chunk, 0 where blocks are short, None where the budget is spent.
        """
        request_id = request.request_id
        num_cached = self.kv_cache.match_prefix(
            request_id, request.token_ids(0, request.num_tokens)
        )
        num_tokens = request.num_tokens - num_cached
        if num_tokens > token_budget:
            if not self.enable_chunked_prefill and not is_first:
                self.kv_cache.free(request_id, will_return=True)
                return None
            if self.enable_chunked_prefill:
                num_tokens = token_budget
        if not self._has_room(request, num_growing) or not self.kv_cache.allocate_slots(
            request_id, num_computed_tokens=num_cached, num_new_tokens=num_tokens
        ):
            self.kv_cache.free(request_id, will_return=True)
            return 0
        self.waiting_queue.remove(request)
        self.running_requests[request_id] = request
        request.num_computed_tokens = num_cached
        request.num_skips = 0
        request.state = RequestState.PREFILLING
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s = self.clock()
            request.num_cached_tokens = num_cached
        self._on_admitted(request)
        return num_tokens

    def _has_room(self, request: Request, num_growing: int) -> bool:
        """Whether all of a waiting request fits beside what running ones will take."""
        return self.kv_cache.has_room_for(request.request_id, request.num_tokens, num_growing)

    def _will_grow(self, request: Request) -> bool:
        num_tokens = request.num_prompt_tokens + request.max_tokens
        return self.kv_cache.will_grow(request.request_id, num_tokens)

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        """Take blocks for the next tokens of a running request; False = it skips the step."""
        while not self.kv_cache.allocate_slots(
            request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_tokens,
        ):
            if not self._make_room(request):
                return False
        return True

    def _make_room(self, request: Request) -> bool:
        """Give blocks back for a running request; the oldest gets those of the youngest."""
        oldest = next(iter(self.running_requests.values()))
        youngest = next(reversed(self.running_requests.values()))
        if request is not oldest or youngest is oldest:
            return False
        self._preempt(youngest)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it is computed again from its tokens, first in line."""
        logger.info("request=%d preempted at %d tokens", request.request_id, request.num_tokens)
        self.kv_cache.free(request.request_id, will_return=True)
        del self.running_requests[request.request_id]
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preempted += 1
        self.waiting_queue.appendleft(request)

    def _row(self, request: Request, num_tokens: int) -> BatchRow:
        end = request.num_computed_tokens + num_tokens
        samples = end == request.num_tokens
        return BatchRow(
            request=request,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=num_tokens,
            is_prefill=not request.is_decoding,
            samples=samples,
            next_prompt_token=None if samples else request.token_ids(end, end + 1)[0],
        )

    # -- after the step ------------------------------------------------------------------------

    def process_output(
        self, batch: Batch, output: StepOutput
    ) -> tuple[dict[int, list[int]], list[Request]]:
        """Advance every row's request; returns its new tokens and the requests that finished."""
        now_s = self.clock()
        new_tokens: dict[int, list[int]] = {}
        finished = []
        for row in batch.rows:
            request = row.request
            request.num_computed_tokens += row.num_scheduled_tokens
            if not row.is_prefill:
                request.num_decode_steps += 1
            if row.samples:
                request.state = RequestState.RUNNING
                if not request.output_token_ids:
                    self._on_prefill_complete(request)
                tokens = output.next_tokens[request.request_id]
                request.output_logprobs += output.logprobs.get(request.request_id, [])
                new_tokens[request.request_id] = self._append(request, tokens, now_s)
            if self._fills_a_block(row):
                known = request.token_ids(0, request.num_computed_tokens)
                self.kv_cache.publish(request.request_id, known, request.num_computed_tokens)
            if request.finish_reason is not None and self._is_done(request):
                self._finish(request, request.finish_reason)
                finished.append(request)
        return new_tokens, finished

    def _append(self, request: Request, tokens: Iterable[int], now_s: float) -> list[int]:
        """Append tokens up to the one that ends the output; with fixed steps go on after it."""
        appended = []
        for token_id in tokens:
            request.output_token_ids.append(token_id)
            request.token_times_s.append(now_s)
            if request.finish_reason is None:
                appended.append(token_id)
                reason = self._finish_reason(request, token_id)
                if reason is not None:
                    request.finish_reason = reason
                    request.valid_output_len = len(request.output_token_ids)
            if request.finish_reason is not None and not self.fixed_steps:
                break
        return appended

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        sampling = request.sampling
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH
        return None

    def _is_done(self, request: Request) -> bool:
        # One token comes from the prefill step, the others from max_new_tokens decode steps.
        return not self.fixed_steps or len(request.output_token_ids) > self.max_new_tokens

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.kv_cache.free(request.request_id)
        self._retire(request, reason)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of its queue; its output ends where it was done."""
        self._leave_queue(request)
        if request.valid_output_len is not None:
            del request.output_token_ids[request.valid_output_len :]
            del request.output_logprobs[request.valid_output_len :]
            del request.token_times_s[request.valid_output_len :]
        self._set_finished(request, reason)

    def _leave_queue(self, request: Request) -> None:
        if self.running_requests.pop(request.request_id, None) is None:
            with suppress(ValueError):  # also a preempted request waits
                self.waiting_queue.remove(request)

    def _set_finished(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.finish_time_s = self.clock()
        self.finished_requests[request.request_id] = request
        self._on_request_finished(request)

    def _fills_a_block(self, row: BatchRow) -> bool:
        """Whether this step completed a block that the prefix cache wants."""
        size = self.kv_cache.block_size
        end = row.num_computed_tokens + row.num_scheduled_tokens
        return self.kv_cache.enable_prefix_cache and end // size > row.num_computed_tokens // size

    def forget(self, request_id: int) -> None:
        """Drop a finished request, whose result was taken."""
        if self.finished_requests.pop(request_id, None) is not None:
            del self._requests[request_id]

    # -- hooks of the role-specific schedulers -------------------------------------------------

    def _queue_lengths(self) -> dict[str, int]:
        """Further queues of the status line."""
        return {}

    def _on_refused(self, request: Request) -> None:
        """The request can never run here and is finished next."""

    def _on_admitted(self, request: Request) -> None:
        """The request has left `waiting_queue` and has the blocks of its first chunk."""

    def _on_prefill_complete(self, request: Request) -> None:
        """The request's prompt is computed and its first token sampled in this step; once."""

    def _on_request_finished(self, request: Request) -> None:
        """The request was moved to `finished_requests`."""


def _kind(num_prefill_tokens: int, num_tokens: int) -> Literal["prefill", "decode", "mixed"]:
    if num_prefill_tokens == 0:
        return "decode"
    return "prefill" if num_prefill_tokens == num_tokens else "mixed"
