"""What a DP rank tells its parent: new tokens, ends of requests, and that its loop ticks."""

from collections.abc import Mapping
from typing import Any, Protocol

from inferkit.core.messages import LoopState, Message, Output, WorkerReady, encode
from inferkit.core.protocols import Clock
from inferkit.core.request import FinishReason, Request
from inferkit.online.instance import Instance
from inferkit.online.request_table import Key
from inferkit.online.worker_link import WorkerLink

HEARTBEAT_S = 0.5
"""An idle loop reports so often; one that works does after every step."""


class Outbox(Protocol):
    """Where a loop's results go."""

    def send(
        self,
        new_tokens: Mapping[Key, tuple[Request, int]],
        finished: Mapping[Key, Request],
        state: Mapping[str, Any],
    ) -> None:
        """Called once per tick, and before its step where tokens came without one.

        Args:
            new_tokens: request and the number of tokens that it got since the last call.
            finished: requests that are over.
            state: fields of `LoopState`.
        """
        ...


class NoOutbox:
    """Of ranks that are not the leader of their DP rank."""

    def send(
        self,
        new_tokens: Mapping[Key, tuple[Request, int]],
        finished: Mapping[Key, Request],
        state: Mapping[str, Any],
    ) -> None:
        """The leader has the same to say."""


class OutputSender:
    """The leader's outbox: one multipart message per call that has something to tell."""

    def __init__(self, *, instance: Instance, dp_rank: int, link: WorkerLink, clock: Clock) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.link = link
        self.clock = clock
        self._waiting: list[Message] = []
        self._last_sent_s = float("-inf")

    def announce(self) -> None:
        """This rank takes requests from now on."""
        self.link.announce(encode(WorkerReady(**self.instance.header, dp_rank=self.dp_rank)))

    def refuse(self, key: Key, detail: str) -> None:
        """Answer a request that no scheduler has seen; sent with the next tick's results."""
        self._waiting.append(
            Output(
                **self._header(key),
                index=0,
                finish_reason=FinishReason.REFUSED,
                finish_detail=detail,
            )
        )

    def send(
        self,
        new_tokens: Mapping[Key, tuple[Request, int]],
        finished: Mapping[Key, Request],
        state: Mapping[str, Any],
    ) -> None:
        messages = self._waiting
        self._waiting = []
        for key, (request, count) in new_tokens.items():
            messages.append(self._output(key, request, count, is_over=key in finished))
        for key, request in finished.items():
            if key not in new_tokens:
                messages.append(self._output(key, request, 0, is_over=True))
        now_s = self.clock()
        if not messages and now_s - self._last_sent_s < HEARTBEAT_S:
            return
        self._last_sent_s = now_s
        messages.append(LoopState(**self.instance.header, dp_rank=self.dp_rank, **state))
        self.link.send([encode(message) for message in messages])

    def _header(self, key: Key) -> dict[str, Any]:
        return {**self.instance.header, "room": key[0], "attempt": key[1]}

    def _output(self, key: Key, request: Request, count: int, *, is_over: bool) -> Output:
        num_tokens = len(request.output_token_ids)
        index = num_tokens - count
        return Output(
            **self._header(key),
            index=index,
            token_ids=request.output_token_ids[index:],
            logprobs=request.output_logprobs[index:],
            finish_reason=request.finish_reason if is_over else None,
            finish_detail=request.finish_detail if is_over else "",
            num_cached_tokens=request.num_cached_tokens,
        )
