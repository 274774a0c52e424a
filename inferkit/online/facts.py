"""What an instance says of itself: to a router that it joins, and to anyone at /health."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from inferkit.core.errors import RequestError
from inferkit.core.messages import PROTOCOL_VERSION
from inferkit.kv_transfer.identity import Peer

MAX_EPOCH = 2**64 - 1
MAX_NAME_LEN = 256
READY = "ready"
STATES = ("starting", READY, "unavailable", "draining", "failed")


class Side(StrEnum):
    """The half of a request that an instance computes; also the role that it runs in."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """One life of an instance."""

    url: str
    """Of its HTTP interface, `http://host:port`."""
    side: Side
    instance_id: str
    epoch: int
    state: str = READY
    bootstrap_url: str = ""
    """Of a prefill instance: where decode instances learn how to reach its ranks."""
    model: str = ""
    protocol_version: int = PROTOCOL_VERSION

    @property
    def peer(self) -> Peer:
        return Peer(self.instance_id, self.epoch)

    def to_json(self) -> dict[str, Any]:
        """The epoch is text: many readers of JSON keep 53 bits of a number."""
        return {
            "url": self.url,
            "role": str(self.side),
            "instance_id": self.instance_id,
            "epoch": str(self.epoch),
            "state": self.state,
            "bootstrap_url": self.bootstrap_url,
            "model": self.model,
            "protocol_version": self.protocol_version,
        }


def read_facts(data: Any, *, url: str | None = None) -> InstanceFacts:
    """Facts that have come as JSON.

    Args:
        url: where they were read; None = they name it themselves.

    Raises:
        RequestError: a field is missing or wrong; its name comes first.
    """
    if not isinstance(data, Mapping):
        raise RequestError("url: the body must be a JSON object that describes an instance")
    side = data.get("role")
    if side not in tuple(Side):
        raise RequestError(f"role={side!r:.40} takes no legs; allowed are prefill and decode")
    state = data.get("state", READY)
    if state not in STATES:
        raise RequestError(f"state={state!r:.40} is unknown; allowed are {', '.join(STATES)}")
    bootstrap_url = data.get("bootstrap_url") or ""
    if bootstrap_url or side == Side.PREFILL:
        bootstrap_url = check_url("bootstrap_url", bootstrap_url)
    version = data.get("protocol_version", PROTOCOL_VERSION)
    if not isinstance(version, int):
        raise RequestError(f"protocol_version={version!r:.40} is no number")
    return InstanceFacts(
        url=check_url("url", data.get("url") if url is None else url),
        side=Side(side),
        instance_id=_name("instance_id", data.get("instance_id")),
        epoch=_epoch(data.get("epoch")),
        state=state,
        bootstrap_url=bootstrap_url,
        model=_name("model", data["model"]) if data.get("model") else "",
        protocol_version=version,
    )


def check_url(field: str, url: Any) -> str:
    """An address of an instance, without a path.

    Raises:
        RequestError: it is none.
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        is_good = (
            parts is not None
            and parts.scheme == "http"
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        )
    except ValueError:  # a port that is none, a broken IPv6 address
        is_good = False
    if not is_good:
        raise RequestError(f"{field}={url!r:.200} is no address; give it as http://host:port")
    return str(url).rstrip("/")


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LEN:
        raise RequestError(f"{field}={value!r:.40} is no name of 1 to {MAX_NAME_LEN} characters")
    return value


def _epoch(value: Any) -> int:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) > MAX_EPOCH:
        raise RequestError(f"epoch={value!r:.40} is no number of 64 bits")
    return int(text)
