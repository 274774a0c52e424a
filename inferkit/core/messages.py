"""What crosses a socket: tagged msgspec structs as msgpack, decoded strictly.

Every message says who sent it, for whom it is, and which attempt of which request it belongs to.
Epochs are random 64-bit numbers of an instance's life: a process that is restarted at the same
address is another peer, and what was meant for its predecessor is dropped. Times are never
absolute: `remaining_ms` is the time that is left when the message is sent, and the receiver adds
it to its own clock. Source: protocol sections 1 and 2.
"""

import logging
from collections import Counter
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from inferkit.core.request import FinishReason, Pair, TokenLogprobs
from inferkit.core.sampling_params import MAX_SEED, SamplingParams

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_ROOM = 2**63 - 1
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that bytes from a stranger can make the decoder raise."""

U64: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""More than 64 bits cannot be written in msgpack."""
Room: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROOM)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)]
SampleIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """The common part. Room 0 belongs to no request."""

    protocol_version: int = PROTOCOL_VERSION
    instance_id: Name
    """Of the sender."""
    epoch: U64
    """Of the sender."""
    peer_epoch: U64
    """Of the addressee."""
    room: Room = 0
    attempt: U64 = 0
    """Never used twice for a room."""
    remaining_ms: U64 = 0
    """Time that the request has left; 0 = the message is about none."""

    @property
    def key(self) -> tuple[int, int]:
        """What a request is known by wherever it goes; a room alone never is."""
        return self.room, self.attempt


class Generate(Message, tag="generate", frozen=True, kw_only=True):
    """Run one request."""

    request_id: Name = ""
    """Of the client, for logs only."""
    token_ids: list[TokenId]
    sampling: SamplingParams
    seed: Seed
    sample_index: SampleIndex = 0
    pair: Pair | None = None
    """Of a request that prefill and decode instances share; None = one instance does all of it."""


class Abort(Message, tag="abort", frozen=True, kw_only=True):
    """Give a request up; for one that is unknown or over it means nothing."""

    reason: Name = ""


class Stop(Message, tag="stop", frozen=True, kw_only=True):
    """Leave the loop; what still runs is given up."""


class Output(Message, tag="output", frozen=True, kw_only=True):
    """New tokens of a request, or its end, or both."""

    index: U64
    """Position of the first of these tokens in the output."""
    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprobs] = []
    """One per token, where the request asks for them."""
    finish_reason: FinishReason | None = None
    finish_detail: str = ""
    num_cached_tokens: U64 = 0
    """Prompt tokens that were not computed again."""


class WorkerReady(Message, tag="worker_ready", frozen=True, kw_only=True):
    """A DP rank takes requests from now on."""

    dp_rank: U64


class LoopState(Message, tag="loop_state", frozen=True, kw_only=True):
    """What a DP rank's loop is doing; also the sign that it still ticks."""

    dp_rank: U64
    num_ticks: U64
    num_steps: U64
    num_waiting: U64
    num_running: U64
    kv_used: U64
    kv_total: U64
    num_dropped: U64 = 0
    """Messages that were not for it."""
    hand_off: dict[str, U64] = msgspec.field(default_factory=dict)
    """Of a rank that computes one half of its requests: what is held, and what was dropped."""


ToWorker: TypeAlias = Generate | Abort | Stop
FromWorker: TypeAlias = Output | WorkerReady | LoopState

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


_ENCODER = msgspec.msgpack.Encoder()


class MessageReader(Generic[M]):
    """Decodes what arrives at one addressee. What is malformed or meant for another is dropped,
    counted and told once per cause.

    Args:
        kinds: the union of messages that may arrive here.
        epoch: of the addressee.
        peer_epoch: the only sender's.
    """

    def __init__(self, kinds: Any, *, epoch: int, peer_epoch: int) -> None:
        self.epoch = epoch
        self.peer_epoch = peer_epoch
        self.num_dropped: Counter[str] = Counter()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds)

    def read(self, frame: bytes) -> M | None:
        """The message, or None where it was dropped."""
        try:
            message = self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            version = _version(frame)
            if version in (None, PROTOCOL_VERSION):
                self._drop("malformed", str(error))
            else:
                self._drop("protocol_version", _other_version(version))
            return None
        if message.protocol_version != PROTOCOL_VERSION:
            self._drop("protocol_version", _other_version(message.protocol_version))
        elif message.peer_epoch != self.epoch:
            self._drop("peer_epoch", "it is for a former process at this address")
        elif message.epoch != self.peer_epoch:
            self._drop("epoch", "its sender is not the process that is connected now")
        else:
            return message
        return None

    def refused_request(self, frame: bytes) -> tuple[tuple[int, int], str] | None:
        """Of a frame that `read` dropped: the request whose sender waits for an answer, and what
        is wrong with it; None where nobody of this peer does."""
        try:
            self._decoder.decode(frame)
        except msgspec.ValidationError as error:
            try:
                header = msgspec.msgpack.decode(frame, type=_AnyRequest)
            except DECODE_ERRORS:
                return None
            is_ours = (header.peer_epoch, header.epoch) == (self.epoch, self.peer_epoch)
            if is_ours and header.kind == "generate":
                return (header.room, header.attempt), str(error)
        except DECODE_ERRORS:
            return None
        return None

    def _drop(self, cause: str, detail: str) -> None:
        self.num_dropped[cause] += 1
        if self.num_dropped[cause] == 1:
            logger.warning("a message is dropped (%s): %s", cause, detail)


class _AnyVersion(msgspec.Struct):
    protocol_version: int


class _AnyRequest(msgspec.Struct):
    kind: str
    epoch: int
    peer_epoch: int
    room: Room
    attempt: U64


def _other_version(version: int | None) -> str:
    return (
        f"the sender speaks version {version}, this is {PROTOCOL_VERSION}; run the same release on "
        "both sides"
    )


def _version(frame: bytes) -> int | None:
    try:
        return msgspec.msgpack.decode(frame, type=_AnyVersion).protocol_version
    except DECODE_ERRORS:
        return None
