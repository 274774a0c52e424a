"""What a bootstrap server knows of the prefill ranks of its instance.

Ranks register again and again; who is silent for three intervals is forgotten. So a server that
restarts empty is complete again within one interval, and one whose rank hangs says so. Knows no
socket; time comes from outside.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from inferkit.core.messages import MAX_ROOM, PROTOCOL_VERSION
from inferkit.core.protocols import Clock
from inferkit.core.transfer_messages import InstanceLayout, LayerLayout, Register
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.route import (
    Health,
    RankAddress,
    Route,
    dp_size,
    layout_fault,
    make_route,
)
from inferkit.online.errors import BadRequest, ServiceError, Unavailable

logger = logging.getLogger(__name__)

NUM_INTERVALS = 3
"""A rank that has not registered for so many is forgotten."""
ROOM_TTL_S = 1800.0
"""The longest that a request may take."""
MAX_ROOMS = 2**16
MAX_QUERIED_ROOMS = 4096
NUM_NAMED_RANKS = 8


class OtherLife(ServiceError):
    """A registration that is of another instance, or of another life of this one."""

    status = 409
    kind = "conflict_error"
    code = "other_life"


@dataclass(slots=True)
class _Entry:
    register: Register
    address: RankAddress
    expires_at: float


class BootstrapTable:
    """Args:
    instance_id, epoch: of the instance whose ranks register here. The epoch is drawn when the
        instance starts, not when this table is made.
    """

    def __init__(
        self, *, instance_id: str, epoch: int, register_interval_s: float, clock: Clock
    ) -> None:
        self.peer = Peer(instance_id, epoch)
        self.ttl_s = NUM_INTERVALS * register_interval_s
        self.clock = clock
        self._entries: dict[int, _Entry] = {}
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Room -> DP rank, and until when it is kept; the oldest first."""
        self._was_ready = False

    # -- ranks ---------------------------------------------------------------------------------

    def check(self, register: Register) -> None:
        """Refuse what may not be registered.

        Raises:
            OtherLife: it is not of this life of the instance; both values are named.
            BadRequest: a value cannot be, or differs from that of the other ranks.
        """
        self._check_life(register)
        layout = register.layout
        fault = layout_fault(layout)
        if fault is not None:
            raise BadRequest(f"layout.{fault[0]}: {fault[1]}", param=f"layout.{fault[0]}")
        num_ranks = layout.attn_tp_size * layout.attn_dp_size
        if register.rank >= num_ranks:
            raise BadRequest(
                f"rank={register.rank} is out of range; the layout has {num_ranks} ranks, "
                f"allowed is 0 to {num_ranks - 1}",
                param="rank",
            )
        fault_of_address = _address(register).fault
        if fault_of_address:
            raise BadRequest(fault_of_address, param="rank_ip")
        self._check_like_others(register)

    def has_address(self, register: Register) -> bool:
        """The rank has registered lately, at the same address."""
        known = self._live().get(register.rank)
        return known is not None and known.address == _address(register)

    def register(self, register: Register) -> None:
        """Take what a rank says of itself; the last one of a rank counts.

        Raises:
            OtherLife, BadRequest: see `check`.
        """
        self.check(register)
        address = _address(register)
        known = self._entries.get(register.rank)
        if known is not None and known.address != address:
            logger.warning(
                "rank=%d has moved from %s to %s", register.rank, known.address.url, address.url
            )
        self._entries[register.rank] = _Entry(register, address, self.clock() + self.ttl_s)
        self._note_readiness()

    @property
    def is_ready(self) -> bool:
        """Every rank has registered, and lately; distinct ranks count, not registrations."""
        layout = self._layout()
        if layout is None:
            return False
        return len(self._entries) == layout.attn_tp_size * layout.attn_dp_size

    def health(self) -> Health:
        self._note_readiness()
        return Health(
            ready=self._was_ready,
            instance_id=self.peer.instance_id,
            epoch=self.peer.epoch,
            protocol_version=PROTOCOL_VERSION,
        )

    def route(self) -> Route:
        """Where all ranks are.

        Raises:
            Unavailable: not all of them are here; some that are missing are named.
        """
        self._note_readiness()
        layout = self._layout()
        if layout is None:
            raise Unavailable("no prefill rank has registered yet")
        num_ranks = layout.attn_tp_size * layout.attn_dp_size
        if not self._was_ready:
            missing = (rank for rank in range(num_ranks) if rank not in self._entries)
            some = ", ".join(map(str, islice(missing, NUM_NAMED_RANKS)))
            raise Unavailable(
                f"{len(self._entries)} of {num_ranks} prefill ranks have registered; "
                f"missing are ranks {some}"
            )
        return make_route(
            self.peer,
            layout,
            {rank: entry.address for rank, entry in self._entries.items()},
            max_prefill_tokens=self._entries[0].register.max_prefill_tokens,
        )

    def _check_life(self, register: Register) -> None:
        given = {
            "protocol_version": (register.protocol_version, PROTOCOL_VERSION),
            "instance_id": (register.instance_id, self.peer.instance_id),
            "epoch": (register.epoch, self.peer.epoch),
            "peer_epoch": (register.peer_epoch, self.peer.epoch),
        }
        for name, (theirs, ours) in given.items():
            if theirs == ours:
                continue
            if name == "protocol_version":
                raise BadRequest(
                    f"protocol_version={theirs} of rank {register.rank}, this server speaks "
                    f"{ours}; run the same release of inferkit on all nodes of an instance",
                    param=name,
                )
            raise OtherLife(
                f"{name}={theirs!r} of rank {register.rank} is not that of this instance, "
                f"{ours!r}; only ranks that this instance has started may register here",
                param=name,
            )

    def _check_like_others(self, register: Register) -> None:
        others = (entry.register for rank, entry in self._live().items() if rank != register.rank)
        other = next(others, None)
        if other is None:
            return
        found = _difference(register.layout, other.layout)
        if found is None and register.max_prefill_tokens != other.max_prefill_tokens:
            found = ("max_prefill_tokens", register.max_prefill_tokens, other.max_prefill_tokens)
        if found is not None:
            name, theirs, ours = found
            raise BadRequest(
                f"{name}: rank {register.rank} has {theirs!r}, rank {other.rank} has {ours!r}; "
                "start all ranks of an instance from one configuration",
                param=name,
            )

    def _live(self) -> dict[int, _Entry]:
        now = self.clock()
        expired = [rank for rank, entry in self._entries.items() if entry.expires_at <= now]
        for rank in expired:
            del self._entries[rank]
        return self._entries

    def _layout(self) -> InstanceLayout | None:
        entry = next(iter(self._live().values()), None)
        return None if entry is None else entry.register.layout

    def _note_readiness(self) -> None:
        is_ready = self.is_ready
        if is_ready and not self._was_ready:
            logger.info("all %d prefill ranks have registered", len(self._entries))
        elif self._was_ready and not is_ready:
            logger.warning(
                "a prefill rank has not registered for %g s; %d are left",
                self.ttl_s,
                len(self._entries),
            )
        self._was_ready = is_ready

    # -- rooms ---------------------------------------------------------------------------------

    def register_dp_rank(self, room: int, dp_rank: int) -> None:
        """Say which set of ranks computes a room, where it is not room mod dp size.

        Raises:
            BadRequest: the room or the rank is out of range.
            Unavailable: no rank has registered, so nothing is known of their sets.
        """
        _check_room("bootstrap_room", room)
        layout = self._layout()
        if layout is None:
            raise Unavailable("no prefill rank has registered yet")
        size = dp_size(layout)
        if not 0 <= dp_rank < size:
            raise BadRequest(
                f"dp_rank={dp_rank} is out of range; allowed is 0 to {size - 1}", param="dp_rank"
            )
        self._forget_rooms()
        self._rooms.pop(room, None)
        self._rooms[room] = (dp_rank, self.clock() + ROOM_TTL_S)
        while len(self._rooms) > MAX_ROOMS:
            self._rooms.popitem(last=False)

    def query_dp_ranks(self, rooms: Iterable[int]) -> dict[int, int]:
        """Room -> the DP rank that computes it; -1 while no rank has registered.

        Raises:
            BadRequest: a room is out of range, or they are too many.
        """
        asked = list(rooms)
        if len(asked) > MAX_QUERIED_ROOMS:
            raise BadRequest(
                f"bootstrap_rooms has {len(asked)} entries; allowed are at most "
                f"{MAX_QUERIED_ROOMS}",
                param="bootstrap_rooms",
            )
        for room in asked:
            _check_room("bootstrap_rooms", room)
        self._forget_rooms()
        layout = self._layout()
        found = {}
        for room in asked:
            known = self._rooms.get(room)
            computed = -1 if layout is None else room % dp_size(layout)
            found[room] = computed if known is None else known[0]
        return found

    def _forget_rooms(self) -> None:
        now = self.clock()
        while self._rooms and next(iter(self._rooms.values()))[1] <= now:
            self._rooms.popitem(last=False)


def _address(register: Register) -> RankAddress:
    return RankAddress(rank=register.rank, rank_ip=register.rank_ip, rank_port=register.rank_port)


def _check_room(field: str, room: int) -> None:
    if not 1 <= room <= MAX_ROOM:
        raise BadRequest(
            f"{field}: {room} is out of range; allowed is 1 to {MAX_ROOM}", param=field
        )


def _difference(theirs: InstanceLayout, ours: InstanceLayout) -> tuple[str, object, object] | None:
    """The first field in which two layouts differ, with both values."""
    if theirs == ours:
        return None
    for name in InstanceLayout.__struct_fields__:
        left, right = getattr(theirs, name), getattr(ours, name)
        if left == right:
            continue
        field = f"layout.{name}"
        if name not in ("layers", "mtp_layers"):
            return field, left, right
        if len(left) != len(right):
            return f"number of {field}", len(left), len(right)
        return next(
            _layer_difference(f"{field}[{idx}]", *pair)
            for idx, pair in enumerate(zip(left, right, strict=True))
            if pair[0] != pair[1]
        )
    raise AssertionError("layouts that differ have a field that differs")


def _layer_difference(
    field: str, left: LayerLayout, right: LayerLayout
) -> tuple[str, object, object]:
    return next(
        (f"{field}.{name}", getattr(left, name), getattr(right, name))
        for name in LayerLayout.__struct_fields__
        if getattr(left, name) != getattr(right, name)
    )
