"""Tells the bootstrap server where a prefill rank receives, for as long as the rank lives."""

import logging
import threading

import httpx
import msgspec

from inferkit.core.errors import ConfigError
from inferkit.core.transfer_messages import Register
from inferkit.kv_transfer.route import REGISTER_PATH, refusal_text, url_fault
from inferkit.kv_transfer.signature import HttpSignatures

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
REQUEST_TIMEOUT_S = 3.0


class RankRegistration:
    """Registers one rank again and again, in a thread of its own: a server that restarts empty
    hears of it within an interval.

    A server that is not there, or refuses, is asked again for ever, sooner than every interval at
    first; what is wrong is logged when it changes. Nothing of it is raised into the rank.

    Args:
        url: of the bootstrap server, without a path.
        register: what to say; the same for the whole life of the rank.
        secret: shared by all instances; empty = nothing is signed (loopback only).

    Raises:
        ConfigError: `url` is none.
    """

    def __init__(
        self, *, url: str, register: Register, interval_s: float = 5.0, secret: bytes = b""
    ) -> None:
        self.interval_s = interval_s
        url = url.rstrip("/")
        if fault := url_fault(url):
            raise ConfigError(fault)
        self._url = url + REGISTER_PATH
        self._rank = register.rank
        self._body = msgspec.json.encode(register)
        signatures = HttpSignatures(secret=secret)
        self._headers = {
            "content-type": "application/json",
            **signatures.request_headers("PUT", REGISTER_PATH, self._body),
        }
        self._fault: str | None = "it has not been tried"
        """Why the rank is not registered; None = it is."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    @property
    def is_registered(self) -> bool:
        """The server has taken the last registration."""
        return self._fault is None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The server forgets the rank by itself."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(REQUEST_TIMEOUT_S + 1)

    def _run(self) -> None:
        # Proxies of the environment are for the outside world. A connection per registration:
        # servers close idle ones after about the same time.
        with httpx.Client(
            trust_env=False,
            timeout=min(self.interval_s, REQUEST_TIMEOUT_S),
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client:
            first_s = min(FIRST_RETRY_S, self.interval_s)
            retry_s = first_s
            while not self._closing.is_set():
                self._note(self._put(client))
                if self.is_registered:
                    retry_s = first_s
                    self._closing.wait(self.interval_s)
                else:
                    self._closing.wait(retry_s)
                    retry_s = min(2 * retry_s, self.interval_s)

    def _put(self, client: httpx.Client) -> str | None:
        """Why it failed; None = the server has taken it."""
        try:
            answer = client.put(self._url, content=self._body, headers=self._headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"
        if answer.status_code != 200:
            return refusal_text(answer.status_code, answer.content)
        return None

    def _note(self, fault: str | None) -> None:
        if fault == self._fault:
            return
        self._fault = fault
        if fault is None:
            logger.info("rank=%d is registered at %s", self._rank, self._url)
        else:
            logger.warning(
                "rank=%d cannot register at %s, it goes on trying (%s)",
                self._rank,
                self._url,
                fault,
            )
