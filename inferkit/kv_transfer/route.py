"""What a bootstrap server says over HTTP, as it is written and as it is read.

    GET /bootstrap/health   Health
    GET /bootstrap/route    Route, or status 503 while ranks are missing

The fields of a route are those of the reference (section 6.6), and who the instance is.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from inferkit.core.errors import InferkitError
from inferkit.core.messages import DECODE_ERRORS, PROTOCOL_VERSION, U64, Name
from inferkit.core.transfer_messages import InstanceLayout, Rank
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo

HEALTH_PATH = "/bootstrap/health"
ROUTE_PATH = "/bootstrap/route"
REGISTER_PATH = "/bootstrap/register_rank"
MAX_BODY_BYTES = 4 << 20
"""Of a registration or a route; a layer takes about 250 bytes, a rank 60."""
MAX_RANKS = 2**16
MAX_TEXT_LEN = 300
"""Characters of another process' answer in a log line."""
EPOCHS = 2**64
"""JSON knows longer numbers; messages do not."""
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_UNREACHABLE_HOSTS = {"0.0.0.0", "::"}


class RouteError(InferkitError, ValueError):
    """An answer of a bootstrap server that cannot be used; the text says why."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The instance lives; `ready` = every rank of it has registered."""

    status: str = "ok"
    ready: bool
    instance_id: Name
    epoch: U64
    protocol_version: int

    @property
    def peer(self) -> Peer:
        return Peer(self.instance_id, self.epoch)


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    rank: Rank
    rank_ip: Name
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def fault(self) -> str:
        """Why no peer can connect to it; empty = it is an address."""
        if not _HOST.fullmatch(self.rank_ip) or self.rank_ip in _UNREACHABLE_HOSTS:
            return f"rank_ip={self.rank_ip!r} is no address that a peer can connect to"
        return ""

    @property
    def url(self) -> str:
        host = f"[{self.rank_ip}]" if ":" in self.rank_ip else self.rank_ip
        return f"tcp://{host}:{self.rank_port}"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of an instance receive, and what their caches look like."""

    protocol_version: int
    instance_id: Name
    epoch: U64
    layout: InstanceLayout
    ranks: dict[str, RankAddress]
    """`dp,cp,tp` -> address."""
    max_prefill_tokens: U64 = 0
    attn_tp_size: U64 = 0
    attn_cp_size: U64 = 0
    dp_size: U64 = 0
    block_size: U64 = 0
    """Of the first cache tensor, for readers that know one size only."""
    block_sizes: list[U64] = []
    """One per cache tensor: those of a layer one after the other, then those of the next layer."""
    kv_cache_dtype: str = ""
    """Of all layers; several are joined by commas."""


def url_fault(url: str) -> str:
    """Why this is not the address of a bootstrap server; empty = it is one."""
    found = _URL.fullmatch(url)
    if found is None or not 1 <= int(found[2]) <= 65535:
        text = ascii(url)[:MAX_TEXT_LEN]
        return f"{text} is no address of a bootstrap server; expected is http://<host>:<port>"
    return ""


def dp_size(layout: InstanceLayout) -> int:
    """Sets of ranks as a route counts them: ranks that compute one prompt together are one."""
    return 1 if layout.cp_size > 1 else layout.attn_dp_size


def layout_fault(layout: InstanceLayout) -> tuple[str, str] | None:
    """The field of a layout that cannot be, and why; None = it is possible."""
    world_size = layout.attn_tp_size * layout.attn_dp_size
    if world_size > MAX_RANKS:
        return "attn_dp_size", (
            f"attn_tp_size={layout.attn_tp_size} * attn_dp_size={layout.attn_dp_size} are "
            f"{world_size} ranks; allowed are at most {MAX_RANKS}"
        )
    if layout.cp_size > 1 and (layout.attn_tp_size, layout.attn_dp_size) != (1, layout.cp_size):
        return "cp_size", (
            f"cp_size={layout.cp_size} needs attn_tp_size=1 and attn_dp_size={layout.cp_size}; "
            f"they are {layout.attn_tp_size} and {layout.attn_dp_size}"
        )
    if not layout.layers:
        return "layers", "layers=[] has no layer whose cache could be handed over"
    return None


def make_route(
    peer: Peer,
    layout: InstanceLayout,
    addresses: Mapping[int, RankAddress],
    *,
    max_prefill_tokens: int,
) -> Route:
    layers = (*layout.layers, *layout.mtp_layers)
    block_sizes = [layer.block_size for layer in layers for _ in layer.dims]
    return Route(
        protocol_version=PROTOCOL_VERSION,
        instance_id=peer.instance_id,
        epoch=peer.epoch,
        layout=layout,
        ranks={_place(peer, layout, rank): addresses[rank] for rank in sorted(addresses)},
        max_prefill_tokens=max_prefill_tokens,
        attn_tp_size=layout.attn_tp_size,
        attn_cp_size=layout.cp_size,
        dp_size=dp_size(layout),
        block_size=block_sizes[0] if block_sizes else 0,
        block_sizes=block_sizes,
        kv_cache_dtype=",".join(sorted({layer.dtype for layer in layers})),
    )


def read_route(body: bytes) -> PrefillServerInfo:
    """A complete route.

    Raises:
        RouteError: it is malformed, of another release, contradicts itself, or lacks ranks.
    """
    route = _read(body, Route)
    fault = layout_fault(route.layout)
    if fault is not None:
        raise RouteError(f"layout.{fault[0]}: {fault[1]}")
    peer = Peer(route.instance_id, route.epoch)
    addresses: dict[int, str] = {}
    for key, address in route.ranks.items():
        if key != _place(peer, route.layout, address.rank) or address.rank in addresses:
            raise RouteError(f"ranks: {key!r} is not the place of rank {address.rank}")
        if address.fault:
            raise RouteError(f"ranks: {key!r}: {address.fault}")
        addresses[address.rank] = address.url
    info = PrefillServerInfo(peer=peer, layout=route.layout, addresses=addresses)
    if not info.is_complete:
        raise RouteError(f"ranks: {len(addresses)} of {info.world_size} ranks are listed")
    return info


def read_health(body: bytes) -> Health:
    """A sign of life.

    Raises:
        RouteError: it is malformed, or of another release.
    """
    return _read(body, Health)


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def refusal_text(status: int, body: bytes) -> str:
    """For a log line: what a server says that does not do what it was asked."""
    try:
        text = msgspec.json.decode(body, type=_Refusal).error.message
    except DECODE_ERRORS:
        text = body.decode("utf-8", "replace")
    return f"status {status}: {ascii(text)[:MAX_TEXT_LEN]}"


class _AnyVersion(msgspec.Struct):
    protocol_version: int
    instance_id: str = "?"


A = TypeVar("A", Health, Route)


def _read(body: bytes, kind: type[A]) -> A:
    try:
        version = msgspec.json.decode(body, type=_AnyVersion)
        if version.protocol_version != PROTOCOL_VERSION:
            raise RouteError(
                f"instance {version.instance_id!r} speaks protocol_version="
                f"{version.protocol_version}, this one {PROTOCOL_VERSION}; run the same release "
                "of inferkit on all instances"
            )
        found = msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        text = f"{len(body)} bytes are no {kind.__name__.lower()}: {error}"
        raise RouteError(text[:MAX_TEXT_LEN]) from error
    if found.epoch >= EPOCHS:
        raise RouteError(f"epoch={found.epoch} has more than 64 bits")
    return found


def _place(peer: Peer, layout: InstanceLayout, rank: int) -> str:
    info: Any = PrefillServerInfo(peer=peer, layout=layout, addresses={})
    return ",".join(map(str, info.coordinates(rank)))
