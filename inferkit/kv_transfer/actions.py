"""What the record tables ask their owner to do. They do nothing themselves.

The owner carries actions out in the order in which they are returned, before it gives the tables
the next event. An action that fails later is an event again (`on_write_ended`, `on_fenced`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from inferkit.core.request import TokenLogprobs
from inferkit.core.transfer_messages import Handshake, Status, ToDecodeRank, ToPrefillRank
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.kv_transfer.metadata_slot import MAX_DRAFT_TOKENS, SlotPayload


class Code(Enum):
    """How a leg ends; the values are the HTTP status codes of its answer."""

    OK = 200
    REFUSED = 400
    CONFLICT = 409
    CANCELLED = 499
    """Nobody waits for an answer any more."""
    UNAVAILABLE = 503
    """The same room may be tried again with another attempt."""


@dataclass(frozen=True, slots=True)
class Send:
    """A control message to one rank of a peer; it may be lost."""

    peer: Peer
    rank: int
    message: ToPrefillRank | ToDecodeRank
    reply_address: str = ""
    """Of a decode rank, from its Handshake; a prefill rank's address is known by its route."""


@dataclass(frozen=True, slots=True)
class End:
    """The leg of this request is answered; blocks may be held longer."""

    key: TransferKey
    code: Code
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Give back everything that the request holds of a kind. Equal on all ranks of a group."""

    key: TransferKey
    blocks: bool = False
    host_area: bool = False


# -- prefill ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Every Handshake is there on every rank: the request may take blocks and compute."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class PostBlocks:
    """Write KV of a request to one decode rank. One that cannot be posted has failed."""

    write_id: int
    key: TransferKey
    handshake: Handshake
    first_token: int
    """Tokens [first_token, end_token) are complete; the blocks that hold them are to be sent."""
    end_token: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PostSlot:
    """Write `data` at `offset` of the slot that a Handshake names."""

    write_id: int
    key: TransferKey
    handshake: Handshake
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """Drop what has not begun of these writes; each still ends by itself."""

    write_ids: tuple[int, ...]


# -- decode ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Let writes of the transfer land; comes before its Handshakes."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class CloseTransfer:
    """No write of the transfer is in flight or will be posted."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Revoke what may still be written for the transfer, then call `on_fenced`."""

    transfer_id: int
    peer: Peer
    prefill_ranks: tuple[int, ...]
    """Those that have not acknowledged."""


@dataclass(frozen=True, slots=True)
class Landed:
    """KV of every link and the first token of every rank are there: the request runs."""

    key: TransferKey
    slot: SlotPayload
    status: Status
    """One of the equal ones: first token, its logprobs, seed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The first token ended the request; no KV was sent."""

    key: TransferKey
    status: Status


@dataclass(frozen=True, slots=True)
class Retracted:
    """The copy to host memory is complete on every rank."""

    key: TransferKey


Action = (
    Send
    | End
    | Release
    | Ready
    | PostBlocks
    | PostSlot
    | CancelWrites
    | OpenTransfer
    | CloseTransfer
    | Fence
    | Landed
    | Finished
    | Retracted
)


class Outbox:
    """Actions of one event, in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What prefill hands over beside the KV."""

    token_id: int
    kv_len: int
    """Prompt tokens whose KV is sent."""
    seed: int = 0
    logprobs: TokenLogprobs | None = None
    draft_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.draft_token_ids) > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{len(self.draft_token_ids)} draft tokens do not fit a metadata slot; "
                f"model.next_n is at most {MAX_DRAFT_TOKENS} in a prefill role"
            )


BlockIds = Mapping[str, tuple[int, ...]]
"""Manager key -> block ids of a request in token order; 0 = the null block."""
