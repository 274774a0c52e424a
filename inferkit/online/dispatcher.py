"""The parent's side of its workers: sends each request to a DP rank, returns its outputs.

Lives in one event loop; no thread, and no wait, per request.
"""

import asyncio
import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from inferkit.core.messages import (
    Abort,
    FromWorker,
    Generate,
    LoopState,
    Message,
    MessageReader,
    Output,
    Stop,
    WorkerReady,
    encode,
)
from inferkit.core.place import LOOPBACK
from inferkit.core.protocols import Clock
from inferkit.kv_transfer.signature import FrameSeal
from inferkit.online.errors import GenerationFailed, RoomInUse, ServiceError, Unavailable
from inferkit.online.instance import Attempts, Instance, ParentAddress, socket_identity
from inferkit.online.request_table import Key
from inferkit.online.work import NOT_READY, Work

logger = logging.getLogger(__name__)

UNLIMITED = 0
LOADING = "the model is not loaded yet; GET /ready tells when it is"


class OutputStream:
    """Outputs of one generation in order; ends with the one that has a finish reason.

    Raises from the iteration:
        ServiceError: the generation cannot go on.
    """

    def __init__(self, work: Work, *, key: Key, dp_rank: int, dispatcher: "DPDispatcher") -> None:
        self.work = work
        self.key = key
        self.dp_rank = dp_rank
        self.num_outstanding = work.num_tokens
        """Tokens that its DP rank still has to compute for it, at most."""
        self.is_over = False
        self._dispatcher = dispatcher
        self._arrived: asyncio.Queue[Output | ServiceError] = asyncio.Queue()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> Output:
        if self.is_over and self._arrived.empty():
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, ServiceError):
            raise item
        return item

    def put(self, item: Output | ServiceError) -> None:
        """Called by the dispatcher."""
        if isinstance(item, ServiceError) or item.finish_reason is not None:
            self.is_over = True
        self._arrived.put_nowait(item)

    def abort(self, reason: str) -> None:
        """Ask for the end; it comes as an output with the finish reason `abort`."""
        if not self.is_over:
            self._dispatcher.abort(self, reason)

    def cancel(self, reason: str) -> None:
        """The same for who does not want to hear of it any more."""
        if not self.is_over:
            self.abort(reason)
            self.is_over = True
            self._dispatcher.forget(self)


@dataclass(kw_only=True)
class _Rank:
    """A DP rank as the parent sees it."""

    dp_rank: int
    is_ready: bool = False
    last_sign_s: float = 0.0
    state: LoopState | None = None
    num_streams: int = 0
    num_outstanding: int = 0


class DPDispatcher:
    """Chooses the DP rank with the least outstanding tokens.

    Args:
        dp_size: DP ranks of the instance.
        host: address that workers reach this process by.
        port: of the sockets, this and the next one (0 = free ones are chosen).
        request_url, output_url: other places for the sockets than two ports of the host.
        secret: shared with workers; empty = frames are not authenticated.
        context: of ZMQ; None = one of its own.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        dp_size: int,
        clock: Clock,
        host: str = LOOPBACK,
        port: int = 0,
        request_url: str = "",
        output_url: str = "",
        secret: bytes = b"",
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.instance = instance
        self.clock = clock
        self.request_url = request_url or f"tcp://{host}:{port}"
        self.output_url = output_url or f"tcp://{host}:{port + 1 if port else 0}"
        self.attempts = Attempts()
        self.seal = FrameSeal(secret)
        self.failure: ServiceError | None = None
        """Why no request can be served any more."""
        self.changed = asyncio.Event()
        """Set whenever a rank becomes ready or the dispatcher fails."""
        self.num_late_outputs = 0
        self.num_not_authentic = 0
        self._ranks = [_Rank(dp_rank=dp_rank) for dp_rank in range(dp_size)]
        self._streams: dict[Key, OutputStream] = {}
        self._identities = {socket_identity(instance, rank): rank for rank in range(dp_size)}
        self._owns_context = context is None
        self._context = context or zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._outgoing: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._reader: MessageReader[FromWorker] = MessageReader(
            FromWorker, epoch=instance.epoch, peer_epoch=instance.epoch
        )

    # -- start and end -------------------------------------------------------------------------

    async def start(self) -> ParentAddress:
        """Bind the sockets; returns where workers find them.

        Raises:
            zmq.ZMQError: an address cannot be bound.
        """
        router, pull = (self._context.socket(kind) for kind in (zmq.ROUTER, zmq.PULL))
        self._sockets = [router, pull]
        # Without it a message for a rank that is not connected would vanish without a word.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for socket in self._sockets:
            socket.setsockopt(zmq.SNDHWM, UNLIMITED)
            socket.setsockopt(zmq.RCVHWM, UNLIMITED)
            socket.setsockopt(zmq.LINGER, 0)
        router.bind(self.request_url)
        pull.bind(self.output_url)
        self._tasks = [
            asyncio.create_task(self._receive_from_router(router)),
            asyncio.create_task(self._receive_outputs(pull)),
            asyncio.create_task(self._send(router)),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        return ParentAddress(
            instance=self.instance, request_url=_bound(router), output_url=_bound(pull)
        )

    async def close(self) -> None:
        """Undo `start`; what still runs fails."""
        self.fail(Unavailable("the service has ended"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close()
        if self._owns_context:
            self._context.term()

    def fail(self, error: ServiceError) -> None:
        """End all generations with this error, and refuse new ones."""
        if self.failure is None:
            self.failure = error
        for stream in list(self._streams.values()):
            self.forget(stream)
            stream.put(error)
        self.changed.set()

    def stop_workers(self) -> None:
        """Let every rank leave its loop."""
        for rank in self._ranks:
            self._outgoing.put_nowait((rank.dp_rank, Stop(**self.instance.header)))

    # -- requests ------------------------------------------------------------------------------

    def submit(self, work: Work, *, dp_rank: int | None = None) -> OutputStream:
        """Send a generation on its way.

        Args:
            dp_rank: where to (None = the rank with the least to do).

        Raises:
            Unavailable: no rank can take it.
            RoomInUse: its attempt runs already.
        """
        if self.failure is not None:
            raise Unavailable(str(self.failure))
        ready = [rank for rank in self._ranks if rank.is_ready and dp_rank in (None, rank.dp_rank)]
        if not ready:
            raise Unavailable(LOADING)
        rank = min(ready, key=lambda r: (r.num_outstanding, r.num_streams, r.dp_rank))
        key = (work.room, self.attempts.next() if work.attempt is None else work.attempt)
        if key in self._streams:
            raise RoomInUse(f"attempt {key[1]} of bootstrap_room={key[0]} runs already")
        stream = OutputStream(work, key=key, dp_rank=rank.dp_rank, dispatcher=self)
        self._streams[key] = stream
        rank.num_streams += 1
        rank.num_outstanding += stream.num_outstanding
        message = Generate(
            **self.instance.header,
            room=key[0],
            attempt=key[1],
            remaining_ms=int(work.remaining_s * 1000),
            request_id=work.request_id,
            token_ids=work.token_ids,
            sampling=work.sampling,
            seed=work.seed,
            sample_index=work.sample_index,
            pair=work.pair,
        )
        self._outgoing.put_nowait((rank.dp_rank, message))
        return stream

    def abort(self, stream: OutputStream, reason: str) -> None:
        """Called by the stream."""
        room, attempt = stream.key
        message = Abort(**self.instance.header, room=room, attempt=attempt, reason=reason)
        self._outgoing.put_nowait((stream.dp_rank, message))

    def forget(self, stream: OutputStream) -> None:
        """Called for a stream that is over; its late outputs are dropped."""
        if self._streams.pop(stream.key, None) is not None:
            self._ranks[stream.dp_rank].num_streams -= 1
            self._set_outstanding(stream, 0)

    def _set_outstanding(self, stream: OutputStream, num_tokens: int) -> None:
        rank = self._ranks[stream.dp_rank]
        rank.num_outstanding += num_tokens - stream.num_outstanding
        stream.num_outstanding = num_tokens

    # -- what is known of the ranks ------------------------------------------------------------

    def missing(self) -> list[str]:
        """Why no request can be served now; empty = requests are taken."""
        if self.failure is not None:
            return [str(self.failure)]
        return [] if self.are_ranks_ready else [NOT_READY]

    async def until_changed(self) -> None:
        """Wait until a rank becomes ready or the dispatcher fails."""
        await self.changed.wait()
        self.changed.clear()

    def stats(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"dp_ranks": self.rank_stats(), "dropped_messages": self.dropped()}

    @property
    def dp_size(self) -> int:
        return len(self._ranks)

    @property
    def are_ranks_ready(self) -> bool:
        return self.failure is None and all(rank.is_ready for rank in self._ranks)

    @property
    def num_running(self) -> int:
        return len(self._streams)

    def silent_ranks(self, limit_s: float) -> list[int]:
        """DP ranks whose loop has given no sign for so long."""
        now_s = self.clock()
        return [
            rank.dp_rank
            for rank in self._ranks
            if rank.is_ready and now_s - rank.last_sign_s > limit_s
        ]

    def rank_stats(self) -> list[dict[str, Any]]:
        """Plain JSON data of every DP rank."""
        return [self._stats_of(rank) for rank in self._ranks]

    def dropped(self) -> Mapping[str, int]:
        """Cause -> messages that were not for this instance."""
        dropped = {**self._reader.num_dropped, "late": self.num_late_outputs}
        if self.num_not_authentic:
            dropped["not_authentic"] = self.num_not_authentic
        return dropped

    def _stats_of(self, rank: _Rank) -> dict[str, Any]:
        state = rank.state
        fields = ("num_waiting", "num_running", "kv_used", "kv_total", "num_steps", "num_ticks")
        return {
            "dp_rank": rank.dp_rank,
            "is_ready": rank.is_ready,
            "num_requests": rank.num_streams,
            "outstanding_tokens": rank.num_outstanding,
            "last_sign_s": round(self.clock() - rank.last_sign_s, 3) if rank.is_ready else None,
            **{name: getattr(state, name) if state else 0 for name in fields},
            **({"hand_off": state.hand_off} if state and state.hand_off else {}),
        }

    # -- sockets -------------------------------------------------------------------------------

    async def _send(self, router: zmq.asyncio.Socket) -> None:
        while True:
            dp_rank, message = await self._outgoing.get()
            identity = socket_identity(self.instance, dp_rank)
            try:
                await router.send_multipart([identity, self.seal.seal(encode(message))])
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                logger.warning("DP rank %d is not connected; %s is lost", dp_rank, message.key)
                stream = self._streams.get(message.key)
                if stream is not None:
                    self.forget(stream)
                    stream.put(Unavailable(f"DP rank {dp_rank} is not connected"))

    async def _receive_from_router(self, router: zmq.asyncio.Socket) -> None:
        while True:
            identity, *frames = await router.recv_multipart()
            dp_rank = self._identities.get(bytes(identity))
            for frame in frames:
                message = self._read(frame)
                # The address that a rank announces must be its own.
                if isinstance(message, WorkerReady) and message.dp_rank == dp_rank:
                    rank = self._ranks[dp_rank]
                    rank.is_ready, rank.last_sign_s = True, self.clock()
                    self.changed.set()

    async def _receive_outputs(self, pull: zmq.asyncio.Socket) -> None:
        while True:
            for frame in await pull.recv_multipart():
                message = self._read(frame)
                if isinstance(message, Output):
                    self._deliver(message)
                elif isinstance(message, LoopState) and message.dp_rank < len(self._ranks):
                    rank = self._ranks[message.dp_rank]
                    rank.state, rank.last_sign_s = message, self.clock()

    def _read(self, sealed: bytes) -> FromWorker | None:
        frame = self.seal.open(sealed)
        if frame is None:
            self.num_not_authentic += 1
            return None
        return self._reader.read(frame)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.key)
        if stream is None:
            self.num_late_outputs += 1
            return
        stream.put(output)
        if stream.is_over:
            self.forget(stream)
        elif output.token_ids:
            num_done = output.index + len(output.token_ids)
            left = (stream.work.sampling.max_tokens or 0) - num_done
            self._set_outstanding(stream, max(0, left))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the dispatcher failed", exc_info=error)
            self.fail(GenerationFailed(f"the dispatcher failed: {error}"))


def _bound(socket: zmq.asyncio.Socket) -> str:
    url: str | bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return url.decode() if isinstance(url, bytes) else url
