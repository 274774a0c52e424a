"""Messages of the prefill/decode hand-off, from rank to rank; the common part is in messages.py.

    decode rank  -> prefill rank   Handshake, LeaseRenew, TransferAbort
    prefill rank -> decode rank    Status, DrainAck
    prefill rank -> bootstrap      Register

Who sends what when, and what a lost or doubled message does: inferkit/kv_transfer/README.md.
"""

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec

from inferkit.core.errors import InferkitError
from inferkit.core.messages import PROTOCOL_VERSION, U64, Message, Name, Seed, TokenId, encode
from inferkit.core.request import TokenLogprobs

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class MessageError(InferkitError, ValueError):
    """Bytes that are no message of this protocol; the text says why."""


class TensorAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one cache tensor of a decode rank lies."""

    layer_idx: U64
    tensor_idx: U64
    """Position in `CacheSpec.dims`."""
    region: U64
    """Memory that the decode rank's transfer engine has registered."""
    offset: U64
    """Bytes from the start of the region."""


class TargetMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a prefill rank must know to write into a decode rank."""

    engine: dict[str, Any]
    """`TransferEngine.describe()` of the decode rank; new in every process (protocol section 4)."""
    attn_tp_size: Positive = 1
    """Of the decode instance; with the layers, which are equal, it gives each rank's heads."""
    tensors: tuple[TensorAddress, ...] = ()
    num_blocks: dict[str, Positive] = {}
    """Blocks per manager key, the null block included."""
    slot_region: U64 = 0
    slot_offset: U64 = 0
    """Where slot 0 lies; the others follow at 64 bytes each."""


class ToPrefill(Message, frozen=True):
    """What every message of a decode rank says about it."""

    decode_rank: Rank
    reply_address: Name
    """Where that rank receives Status and DrainAck, `tcp://host:port`."""


class Handshake(ToPrefill, frozen=True, tag="handshake"):
    """A decode rank has blocks and a slot for a request and says where."""

    transfer_id: Positive
    floor: U64
    """Every smaller id of this decode rank is over; a prefill rank refuses those for good."""
    required_dst_info_num: U64
    """Handshakes that the addressed rank needs before it may compute; 0 = it sends nothing."""
    memory: TargetMemory
    block_ids: dict[str, tuple[BlockId, ...]] = {}
    """Manager key -> blocks in token order; 0 is a place that nobody reads."""
    slot: U64 = 0


class TransferState(StrEnum):
    READY = "ready"
    """The Handshake has arrived; nothing is written yet."""
    SENDING = "sending"
    OK = "ok"
    """Blocks and slot are placed; nothing more will be written."""
    FINISHED = "finished"
    """The first token ended the request: nothing is in flight, and no slot will be written."""
    FAILED = "failed"


class Status(Message, frozen=True, tag="status"):
    """Where a prefill rank stands with one decode rank; idempotent.

    The last five fields say something with ok and finished only.
    """

    transfer_id: Positive
    prefill_rank: Rank
    state: TransferState
    first_token: TokenId = 0
    logprobs: TokenLogprobs | None = None
    """Of the first token."""
    seed: Seed = 0
    """Of the request, as prefill has it."""
    digest: Name = ""
    """Of the bytes that this link moved; empty = not computed."""


class LeaseRenew(ToPrefill, frozen=True, tag="lease_renew"):
    """A decode rank still waits for these transfers; answered with their Status."""

    transfer_ids: tuple[Positive, ...]
    floor: U64


class TransferAbort(ToPrefill, frozen=True, tag="transfer_abort"):
    """Write no more for this transfer; answered with DrainAck once nothing is in flight."""

    transfer_id: Positive


class DrainAck(Message, frozen=True, tag="drain_ack"):
    """No write of this link is in flight and none will ever be posted."""

    transfer_id: Positive
    prefill_rank: Rank


class LayerLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cache of one layer over all ranks; a `CacheSpec` is one rank's share of it."""

    layer_idx: U64
    kind: Name
    manager_key: Name
    num_kv_heads: Positive
    """Of the model, without padding and replicas; 1 for latent attention."""
    dims: tuple[Positive, ...]
    dtype: Name
    block_size: Positive
    layout: Name
    window: Positive | None = None


class InstanceLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of an instance that decides what its KV cache holds, and where."""

    model: Name
    model_fingerprint: Name
    """Hash over names, sizes and headers of the model files, or over the shape without weights."""
    transfer_engine: Name
    """Name and version of the engine, as in `tcp/1`."""
    attn_tp_size: Positive = 1
    attn_dp_size: Positive = 1
    """Sets of ranks that hold requests of their own; each rank of `cp_size` is such a set."""
    cp_size: Positive = 1
    """Ranks that compute a prompt together; one of them keeps its KV."""
    layers: tuple[LayerLayout, ...]
    mtp_layers: tuple[LayerLayout, ...] = ()
    """Layers that predict drafts; their indices follow those of `layers`."""
    verify_digest: bool = False


class Register(Message, frozen=True, tag="register"):
    """A prefill rank can be reached; repeated, since a bootstrap server may restart empty."""

    rank: Rank
    rank_ip: Name
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    layout: InstanceLayout
    max_prefill_tokens: U64 = 0


ToPrefillRank: TypeAlias = Handshake | LeaseRenew | TransferAbort
ToDecodeRank: TypeAlias = Status | DrainAck
TransferMessage: TypeAlias = ToPrefillRank | ToDecodeRank | Register

_DECODER: msgspec.msgpack.Decoder[TransferMessage] = msgspec.msgpack.Decoder(TransferMessage)


# What decoding strange bytes raises; the last two come from strings and from deep nesting.
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _AnyVersion(msgspec.Struct):
    protocol_version: int
    instance_id: str = "?"


def encode_transfer(message: TransferMessage) -> bytes:
    return encode(message)


def decode_transfer(frame: bytes) -> TransferMessage:
    """The message in a frame; whom it is for is checked by whom it reaches.

    Raises:
        MessageError: the bytes are no such message, a field is missing, unknown or of the wrong
            kind, or the sender speaks another version of the protocol.
    """
    try:
        message = _DECODER.decode(frame)
    except _MALFORMED as error:
        version = _version(frame)
        if version is None or version.protocol_version == PROTOCOL_VERSION:
            raise MessageError(f"{len(frame)} bytes are no transfer message: {error}") from error
        raise _other_version(version.instance_id, version.protocol_version) from error
    if message.protocol_version != PROTOCOL_VERSION:
        raise _other_version(message.instance_id, message.protocol_version)
    return message


def _other_version(instance_id: str, version: int) -> MessageError:
    return MessageError(
        f"instance {instance_id!r} speaks protocol_version={version}, this one "
        f"{PROTOCOL_VERSION}; run the same release of inferkit on all instances"
    )


def _version(frame: bytes) -> _AnyVersion | None:
    try:
        return msgspec.msgpack.decode(frame, type=_AnyVersion)
    except _MALFORMED:
        return None
