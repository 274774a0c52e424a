"""What runs a record table: threads, sockets, the lock. One manager per rank.

    model thread      common events and `tick`; never waits for a peer
    listener thread   owns the control sockets; messages and timers
    write thread      of a prefill rank: posts writes, polls them

All calls of the table happen under one lock, and what they ask for is carried out before it is let
go: a message is queued for the listener, a write for the write thread, a transfer is opened at
once. What concerns the scheduler is returned to it. A thread that has died by an error is told by
the next `tick`, which raises it.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from inferkit.core.errors import InferkitError
from inferkit.core.protocols import Clock, TransferEngine
from inferkit.core.transfer_messages import (
    MessageError,
    TransferMessage,
    decode_transfer,
    encode_transfer,
)
from inferkit.kv_transfer.actions import Action, Send
from inferkit.kv_transfer.control_channel import ControlChannel
from inferkit.kv_transfer.identity import TransferKey
from inferkit.kv_transfer.status import AllReduceMin

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Timers of the table are looked at so often, whatever the scheduler does."""


class TransferThreadError(InferkitError, RuntimeError):
    """A thread of the manager has ended by an error: this rank can hand nothing over any more."""


class Table(Protocol):
    """What both record tables have."""

    num_dropped: Counter[str]

    @property
    def records(self) -> Mapping[TransferKey, Any]: ...

    def votes(self) -> list[int]: ...

    def decide(self, minimum: Sequence[int]) -> list[Action]: ...

    def tick(self) -> list[Action]: ...


class KVTransferManager(ABC):
    """The constructor stores; `start` opens sockets and threads, `close` ends them.

    Args:
        engine: not started; started and closed here.
        all_reduce_min: over the TP group; every rank enters with vectors of one length.
        host: address of this rank under which peers reach it.
        secret: authenticates control messages; needed off loopback.
    """

    def __init__(
        self,
        *,
        engine: TransferEngine,
        clock: Clock,
        all_reduce_min: AllReduceMin,
        host: str,
        secret: bytes,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.all_reduce_min = all_reduce_min
        self.channel = ControlChannel(host=host, secret=secret)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_closing = False
        self._is_started = False
        self._listener = threading.Thread(
            target=self._listen, name="kv-transfer-listener", daemon=True
        )

    @property
    @abstractmethod
    def table(self) -> Table:
        """The record table; its calls need the lock."""

    @property
    def port(self) -> int:
        """Of the control socket; known after `start`."""
        return self.channel.port

    @property
    def address(self) -> str:
        """`tcp://host:port` of the control socket; known after `start`."""
        return self.channel.address

    @property
    def num_records(self) -> int:
        """Requests that `tick` votes on. Equal on all ranks between two common events."""
        with self._lock:
            return len(self.table.records)

    def start(self) -> None:
        """Raises OSError or zmq.ZMQError where a socket cannot be had, and what the engine raises.

        All memory is registered before.
        """
        self._is_started = True
        try:
            self.engine.start()
            self.channel.start()
            self._start()
            self._listener.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End threads, sockets and the engine. Afterwards no peer writes into this process."""
        if not self._is_started:
            return
        self._is_started = False
        self._is_closing = True
        self.channel.wake()
        if self._listener.ident is not None:
            self._listener.join()
        self._stop()
        self.channel.close()
        self.engine.close()

    def tick(self) -> list[Action]:
        """Agree with the other ranks and act on it: once per tick of the loop, on every rank of
        the group, by the thread that runs the model, between common events.

        Raises:
            TransferThreadError: a thread of this manager has died.
            TransferEngineError: one of the engine has.
            ValueError: the ranks of the group do not hold the same requests.
        """
        self._check()
        self._before_votes()
        with self._lock:
            if not self.table.records:
                return []
            votes = self.table.votes()
        # Every rank must enter: a missing one blocks the others. Events that come meanwhile change
        # only what this rank votes next time.
        minimum = self.all_reduce_min(votes)
        with self._lock:
            return self._carry_out(self.table.decide(minimum))

    def stats(self) -> dict[str, int]:
        """Plain numbers; those of dropped messages are `dropped_<cause>`."""
        with self._lock:
            dropped = Counter(self.table.num_dropped)
            numbers = self._numbers()
        dropped.update(self.channel.num_dropped)
        return numbers | {f"dropped_{cause}": count for cause, count in sorted(dropped.items())}

    # -- parts of a subclass -------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Between the start of engine and sockets and that of the listener."""

    @abstractmethod
    def _stop(self) -> None:
        """After the end of the listener, before that of sockets and engine."""

    @abstractmethod
    def _before_votes(self) -> None:
        """What the engine wants of the thread that runs the model."""

    @abstractmethod
    def _on_message(self, message: TransferMessage) -> bool:
        """On the listener, without the lock; False = no message for this role."""

    @abstractmethod
    def _address_of(self, action: Send) -> str | None:
        """Where a message goes; under the lock."""

    @abstractmethod
    def _do(self, action: Action) -> bool:
        """Carry an action out, under the lock; False = it concerns the scheduler."""

    @abstractmethod
    def _numbers(self) -> dict[str, int]:
        """Of `stats`; under the lock."""

    # -- shared --------------------------------------------------------------------------------

    def _common(self, call: Callable[[], list[Action]]) -> list[Action]:
        """A common event, by the scheduler."""
        with self._lock:
            return self._carry_out(call())

    def _local(self, call: Callable[[], list[Action]]) -> None:
        """A local event, on any thread."""
        with self._lock:
            left = self._carry_out(call())
        assert not left, f"a local event concerns the scheduler: {left}"

    def _carry_out(self, actions: Sequence[Action]) -> list[Action]:
        """In order, under the lock; returns those that concern the scheduler."""
        left: list[Action] = []
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif not self._do(action):
                left.append(action)
        return left

    def _send(self, action: Send) -> None:
        address = self._address_of(action)
        if address is None:
            self.channel.drop("no_address")
        else:
            self.channel.post(address, encode_transfer(action.message))

    def _fail(self, error: BaseException) -> None:
        """A thread has ended by an error."""
        logger.error("a thread of the KV transfer has died", exc_info=error)
        self._failure = error

    def _check(self) -> None:
        self.engine.check()
        if self._failure is not None:
            raise TransferThreadError(
                f"a thread of the KV transfer has died: {self._failure!r}"
            ) from self._failure

    def _listen(self) -> None:
        next_tick = time.monotonic() + TICK_S
        try:
            while not self._is_closing:
                for frame in self.channel.receive(next_tick - time.monotonic()):
                    self._take(frame)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    with self._lock:
                        left = self._carry_out(self.table.tick())
                    assert not left, f"a timer concerns the scheduler: {left}"
        except BaseException as error:
            self._fail(error)

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_transfer(frame)
        except MessageError as error:
            self.channel.drop("malformed")
            logger.debug("%s", error)
            return
        if not self._on_message(message):
            self.channel.drop("wrong_role")
