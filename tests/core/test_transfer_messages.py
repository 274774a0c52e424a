"""The messages of the hand-off on the wire."""

import random

import msgspec
import pytest

from inferkit.core.messages import Message, encode
from inferkit.core.request import TokenLogprobs
from inferkit.core.transfer_messages import (
    DrainAck,
    Handshake,
    InstanceLayout,
    LayerLayout,
    LeaseRenew,
    MessageError,
    Register,
    Status,
    TargetMemory,
    TensorAddress,
    TransferAbort,
    TransferMessage,
    TransferState,
    decode_transfer,
    encode_transfer,
)

COMMON = {"instance_id": "prefill-0", "epoch": 2**64 - 1, "peer_epoch": 7, "room": 2**63 - 1}
REPLY = "tcp://127.0.0.1:4712"
MEMORY = TargetMemory(
    engine={"host": "127.0.0.1", "port": 4711},
    tensors=(TensorAddress(0, 0, 0, 0), TensorAddress(0, 1, 0, 4096)),
    num_blocks={"full_attention": 8},
    slot_region=1,
)
LAYER = LayerLayout(
    layer_idx=0,
    kind="full_attention",
    manager_key="full_attention",
    num_kv_heads=3,
    dims=(64, 64),
    dtype="bfloat16",
    block_size=128,
    layout="BnBsND",
)
MESSAGES: list[TransferMessage] = [
    Handshake(
        **COMMON,
        attempt=2**64 - 1,
        remaining_ms=1500,
        transfer_id=1,
        floor=0,
        decode_rank=3,
        reply_address=REPLY,
        required_dst_info_num=2,
        memory=MEMORY,
        block_ids={"full_attention": (0, 4, 5)},
        slot=9,
    ),
    Status(
        **COMMON,
        transfer_id=2**64 - 1,
        prefill_rank=0,
        state=TransferState.OK,
        first_token=17,
        logprobs=TokenLogprobs(17, -0.5, 1, ((17, -0.5), (3, -2.0))),
        seed=5,
        digest="abc",
    ),
    LeaseRenew(**COMMON, decode_rank=0, reply_address=REPLY, transfer_ids=(4, 9), floor=4),
    TransferAbort(**COMMON, transfer_id=4, decode_rank=0, reply_address=REPLY),
    DrainAck(**COMMON, transfer_id=4, prefill_rank=1),
    Register(
        **COMMON,
        rank=0,
        rank_ip="10.0.0.1",
        rank_port=18801,
        layout=InstanceLayout(
            model="m", model_fingerprint="f", transfer_engine="tcp/1", layers=(LAYER,)
        ),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: TransferMessage) -> None:
    assert decode_transfer(encode_transfer(message)) == message


def test_kinds_of_messages_differ_on_the_wire() -> None:
    kinds = [msgspec.msgpack.decode(encode_transfer(message))["kind"] for message in MESSAGES]
    assert len(set(kinds)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_carries_the_common_fields(message: TransferMessage) -> None:
    fields = set(msgspec.msgpack.decode(encode_transfer(message)))
    assert {"protocol_version", "instance_id", "epoch", "peer_epoch"} <= fields
    assert {"room", "attempt", "remaining_ms"} <= fields


def test_another_protocol_version_is_refused_with_both_versions() -> None:
    other = msgspec.structs.replace(MESSAGES[3], protocol_version=2)
    with pytest.raises(MessageError, match="'prefill-0' speaks protocol_version=2, this one 1"):
        decode_transfer(encode_transfer(other))


def test_another_protocol_version_is_named_even_where_its_fields_are_strange() -> None:
    frame = msgspec.msgpack.encode(
        {"kind": "status", "protocol_version": 3, "instance_id": "p", "what": 1}
    )
    with pytest.raises(MessageError, match="'p' speaks protocol_version=3"):
        decode_transfer(frame)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transfer_id": 0}, "transfer_id"),
        ({"transfer_id": "4"}, "transfer_id"),
        ({"decode_rank": -1}, "decode_rank"),
        ({"room": -1}, "room"),
        ({"epoch": -1}, "epoch"),
        ({"surprise": 1}, "surprise"),
        ({"kind": "pickle"}, "pickle"),
    ],
)
def test_a_malformed_field_is_named(changed: dict[str, object], message: str) -> None:
    fields = msgspec.msgpack.decode(encode_transfer(MESSAGES[3]))
    with pytest.raises(MessageError, match=message):
        decode_transfer(msgspec.msgpack.encode(fields | changed))


def test_a_message_of_another_channel_is_refused() -> None:
    with pytest.raises(MessageError, match="no transfer message"):
        decode_transfer(encode(Message(instance_id="x", epoch=1, peer_epoch=1)))


def test_random_bytes_raise_nothing_but_message_errors() -> None:
    rng = random.Random(0)
    frames = [rng.randbytes(rng.randrange(80)) for _ in range(500)]
    for message in MESSAGES:
        frame = bytearray(encode_transfer(message))
        for _ in range(50):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
            frames.append(bytes(frame))
    nested = msgspec.msgpack.encode({"kind": "handshake", "memory": None})[:-1]
    frames.append(nested + b"\x81\xa6engine" + b"\x91" * 100_000)
    for frame in frames:
        try:
            decode_transfer(frame)
        except MessageError as error:
            assert "bytes are no transfer message" in str(error) or "protocol_version" in str(error)
