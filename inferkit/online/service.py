"""From a prompt to text, for every HTTP interface: tokenise, send, detokenise, limits, drain.

Lives in the parent's event loop. The tokenizer works in one thread of its own: it is not safe in
several, and a long prompt must not stop the streams of others.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inferkit.core.errors import RequestError
from inferkit.core.protocols import Clock
from inferkit.core.request import Request
from inferkit.core.sampling_params import MAX_SEED, SamplingParams
from inferkit.offline.output_processor import OutputProcessor
from inferkit.offline.prompts import Prompt
from inferkit.online.errors import BadRequest, RoomInUse, ServiceError, Unavailable
from inferkit.online.generation import Generation
from inferkit.online.instance import draw_room
from inferkit.online.limits import check_sampling, check_token_ids, max_new_tokens
from inferkit.online.prompt_ids import render
from inferkit.online.work import NOT_READY, Dispatcher, Work

BACK_STOP_S = 5.0
"""The worker's own deadline comes so much later than the parent's."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the service must know of its model."""

    name: str
    path: str | None
    vocab_size: int
    max_model_len: int
    default_max_tokens: int = 0
    """Output tokens of a request that asks for no number; 0 = to the end of the context."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a client asks for: `n` generations of each prompt."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int = 1
    request_id: str = ""
    room: int | None = None
    """Of the client's own choice."""
    is_streamed: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""


class GenerationService:
    """Starts generations and knows which ones run.

    Args:
        timeout_s: end-to-end limit of a request.
        prober: generates before clients do, once the dispatcher lacks nothing, and raises
            ServiceError where that fails; None = the dispatcher's own word is enough.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        tokenizer: Any,
        model: ServedModel,
        timeout_s: float = 1800.0,
        prober: Callable[[], Awaitable[None]] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.dispatcher = dispatcher
        self.tokenizer = tokenizer
        self.model = model
        self.timeout_s = timeout_s
        self.prober = prober
        self.clock = clock
        self.processor = OutputProcessor(tokenizer)
        self.is_draining = False
        self.has_probed = False
        """Requests could be served, at one time at least."""
        self.num_started = 0
        self._generations: dict[int, tuple[Generation, str]] = {}
        self._rooms: set[int] = set()
        self._last_id = 0
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters; of byte-level tokens bytes, which are not fewer."""
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)

    # -- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """starting, ready, unavailable (again), draining or failed."""
        if self.dispatcher.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if not self.missing():
            return "ready"
        return "unavailable" if self.has_probed else "starting"

    def missing(self) -> list[str]:
        """Why no request is taken for want of who computes it; empty = nothing is."""
        missing = self.dispatcher.missing()
        if not missing and self.prober is not None and not self.has_probed:
            missing = [NOT_READY]
        return missing

    async def probe(self) -> None:
        """Wait until requests can be served.

        Raises:
            ServiceError: they never can.
        """
        while self.dispatcher.missing():
            if self.dispatcher.failure is not None:
                raise self.dispatcher.failure
            await self.dispatcher.until_changed()
        if self.prober is not None:
            await self.prober()
        self.has_probed = True

    def drain(self) -> None:
        """Take no new request from now on."""
        self.is_draining = True

    async def drained(self, limit_s: float) -> bool:
        """Wait until nothing runs any more; False = it took too long."""
        end_s = self.clock() + limit_s
        while (self._generations or self.dispatcher.num_running) and not self.dispatcher.failure:
            if self.clock() > end_s:
                return False
            await asyncio.sleep(0.02)
        return True

    # -- generations ---------------------------------------------------------------------------

    async def start(self, call: Call) -> list[Generation]:
        """Tokenise, check and send all generations of a call; the result keeps their order.

        Raises:
            ServiceError: nothing was started.
        """
        self._check_open(call)
        deadline_s = self.clock() + self.timeout_s
        try:
            check_sampling(call.sampling, self.model.vocab_size)
            plans = [await self._plan(prompt, call) for prompt in call.prompts]
        except RequestError as error:
            raise BadRequest.of(error) from None
        self._check_open(call)  # tokenising takes time
        seed = call.sampling.seed
        generations: list[Generation] = []
        try:
            for prompt, (token_ids, sampling) in zip(call.prompts, plans, strict=True):
                # Without a seed of the client's one is drawn, and samples differ by their index.
                drawn = secrets.randbelow(MAX_SEED) if seed is None else seed
                for sample_index in range(call.n):
                    generations.append(
                        self._send(
                            call,
                            prompt,
                            token_ids,
                            sampling,
                            seed=drawn,
                            sample_index=sample_index,
                            index=len(generations),
                            deadline_s=deadline_s,
                        )
                    )
        except ServiceError:
            for generation in generations:
                generation.cancel("the call could not be started")
            raise
        return generations

    def abort(self, *, request_id: str = "", room: int | None = None) -> int:
        """End running generations by the client's id or room; returns how many there were."""
        found = [
            generation
            for generation, known_id in self._generations.values()
            if (request_id and known_id == request_id) or generation.room == room
        ]
        for generation in found:
            generation.abort("POST /abort")
        return len(found)

    def forget(self, generation: Generation) -> None:
        """Called by a generation that is over."""
        request_id = generation.request.request_id
        if self._generations.pop(request_id, None) is not None:
            self._rooms.discard(generation.room)
            self.processor.remove(request_id)

    def _check_open(self, call: Call) -> None:
        if self.is_draining:
            raise Unavailable("the service is shutting down and takes no new request")
        if self.dispatcher.failure is not None:
            raise Unavailable(str(self.dispatcher.failure))
        missing = self.missing()
        if missing:
            raise Unavailable("; ".join(missing))
        if call.room is not None and call.room in self._rooms:
            raise RoomInUse(
                f"bootstrap_room={call.room} belongs to a request that still runs; "
                "choose another, or leave it out"
            )

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse at once what is too long whatever its tokens are: tokenising 10 MB takes
        seconds, and others wait for it.

        Raises:
            RequestError: it is.
        """
        texts = (
            [prompt]
            if isinstance(prompt, str)
            else [part.get("content") for part in prompt if isinstance(part, dict)]
        )
        num_chars = sum(len(text) for text in texts if isinstance(text, str))
        if num_chars > self.model.max_model_len * self._longest_token:
            raise RequestError(
                f"prompt: {num_chars} characters are more than max_model_len="
                f"{self.model.max_model_len} tokens, of which none has more than "
                f"{self._longest_token} characters"
            )

    async def _plan(self, prompt: Prompt, call: Call) -> tuple[list[int], SamplingParams]:
        """Token ids of a prompt, and how its generations are sampled."""
        self._check_length(prompt)
        task = partial(render, self.tokenizer, prompt, call.template_kwargs)
        loop = asyncio.get_running_loop()
        token_ids = await loop.run_in_executor(self._tokenizer_thread, task)
        check_token_ids("prompt", token_ids, self.model.vocab_size)
        limit = max_new_tokens(
            len(token_ids),
            call.sampling.max_tokens,
            default=self.model.default_max_tokens,
            max_model_len=self.model.max_model_len,
        )
        sampling = replace(
            call.sampling, max_tokens=limit, min_tokens=min(call.sampling.min_tokens, limit)
        )
        return token_ids, sampling

    def _send(
        self,
        call: Call,
        prompt: Prompt,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        index: int,
        deadline_s: float,
    ) -> Generation:
        now_s = self.clock()
        stream = self.dispatcher.submit(
            Work(
                token_ids=token_ids,
                sampling=sampling,
                seed=seed,
                room=call.room or draw_room(),
                is_room_given=call.room is not None,
                sample_index=sample_index,
                request_id=call.request_id,
                remaining_s=deadline_s - now_s + BACK_STOP_S,
            )
        )
        self._last_id += 1
        self.num_started += 1
        request = Request(
            request_id=self._last_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            seed=seed,
            sample_index=sample_index,
            arrival_time_s=now_s,
        )
        self.processor.add(request, prompt, is_streamed=call.is_streamed)
        generation = Generation(
            index=index,
            request=request,
            stream=stream,
            service=self,
            is_streamed=call.is_streamed,
            deadline_s=deadline_s,
        )
        self._generations[request.request_id] = (generation, call.request_id)
        self._rooms.add(generation.room)
        return generation
