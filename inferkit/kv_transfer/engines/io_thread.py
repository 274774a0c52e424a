"""A thread that waits for sockets, so that nobody else has to. Knows no engine."""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.05
TICK_S = 0.25
"""How often `on_tick` callbacks run: they look at deadlines of seconds."""


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection of a non-blocking listener; None when there is none after all."""
    try:
        return listener.accept()[0]
    except (BlockingIOError, ConnectionError):
        return None
    except OSError as error:
        # Out of descriptors or memory: the connection waits, and so does this thread a little.
        logger.warning("a connection cannot be accepted: %s", error)
        time.sleep(ACCEPT_PAUSE_S)
        return None


class IoThread:
    """Runs callbacks of sockets that are ready. All methods but `call` and `close` belong to it.

    Args:
        on_failure: told once, on the thread, when a callback raised; the thread has ended.
    """

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self.on_tick: set[Callable[[], None]] = set()
        self._on_failure = on_failure
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._lock = threading.Lock()
        """Held to wake the thread, so that its descriptor is not closed meanwhile."""
        self._next_tick_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run it on the thread soon; from any thread. Dropped when the thread has ended."""
        self._calls.append(function)
        with self._lock:
            if not self._is_closing:
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, sock: Any, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the events that are ready; again for a socket to change its events."""
        try:
            self._selector.modify(sock, events, callback)
        except KeyError:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: Any) -> None:
        """Before the socket is closed; nothing happens where it was not watched."""
        if not self._is_closing:  # then all of them are forgotten at once
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)

    def close(self) -> None:
        """End the thread after the calls that it was given; from any other thread, once."""
        with self._lock:
            self._is_closing = True
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._step()
            self._run_calls()
        except BaseException as error:
            self._on_failure(error)

    def _step(self) -> None:
        ready = self._selector.select(TICK_S)
        for key, events in ready:
            if key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif self._selector.get_map().get(key.fd) is key:  # not ended by an earlier callback
                key.data(events)
        self._run_calls()
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            for function in tuple(self.on_tick):
                function()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
