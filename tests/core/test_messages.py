"""What crosses a socket, and what is refused there."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferkit.core.messages import (
    MAX_ROOM,
    Abort,
    FromWorker,
    Generate,
    LoopState,
    MessageReader,
    Output,
    Stop,
    ToWorker,
    WorkerReady,
    encode,
)
from inferkit.core.request import FinishReason, TokenLogprobs
from inferkit.core.sampling_params import MAX_SEED, SamplingParams

EPOCH, PEER = 2**64 - 1, 7
HEADER = {"instance_id": "serve-1", "epoch": PEER, "peer_epoch": EPOCH}
REQUEST = {**HEADER, "room": MAX_ROOM, "attempt": 2**64 - 1, "remaining_ms": 1000}


def reader(kinds=ToWorker) -> MessageReader:
    return MessageReader(kinds, epoch=EPOCH, peer_epoch=PEER)


def generate(**changes):
    values = {**REQUEST, "token_ids": [1, 2], "sampling": SamplingParams(), "seed": 5}
    return Generate(**{**values, **changes})


def altered(message, **changes) -> bytes:
    """A message with fields that its class would not take; None takes one away."""
    values = msgspec.msgpack.decode(encode(message)) | changes
    return msgspec.msgpack.encode({k: v for k, v in values.items() if v is not None})


@pytest.mark.parametrize(
    "message",
    [
        generate(
            sampling=SamplingParams(
                temperature=0.5,
                stop=("a", "\u4f60"),
                stop_token_ids=(4,),
                logprobs=2,
                seed=MAX_SEED,
            ),
            seed=MAX_SEED,
            sample_index=3,
            request_id="abc",
        ),
        Abort(**REQUEST, reason="the client is gone"),
        Stop(**HEADER),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_a_worker_arrive_as_they_were(message) -> None:
    assert reader().read(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Output(
            **REQUEST,
            index=3,
            token_ids=[7, 8],
            logprobs=[
                TokenLogprobs(token_id=7, logprob=-0.5, rank=1, top=((7, -0.5), (1, -math.inf))),
                TokenLogprobs(token_id=8, logprob=-math.inf, rank=9, top=()),
            ],
            finish_reason=FinishReason.STOP,
            finish_detail="enough",
            num_cached_tokens=128,
        ),
        WorkerReady(**HEADER, dp_rank=1),
        LoopState(
            **HEADER,
            dp_rank=1,
            num_ticks=2,
            num_steps=3,
            num_waiting=4,
            num_running=5,
            kv_used=6,
            kv_total=7,
            hand_off={"num_known": 8},
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_a_worker_arrive_as_they_were(message) -> None:
    assert reader(FromWorker).read(encode(message)) == message


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (b"", "malformed"),
        (b"\xc1\xff", "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (encode(generate()).replace(b"serve-1", b"serve-\xff"), "malformed"),
        (encode(generate())[:-3], "malformed"),
        (msgspec.msgpack.encode([1, 2]), "malformed"),
        (altered(generate(), kind="shutdown"), "malformed"),
        (altered(generate(), kind=None), "malformed"),
        (altered(generate(), surprise=1), "malformed"),
        (altered(generate(), token_ids=None), "malformed"),
        (altered(generate(), token_ids=[-1]), "malformed"),
        (altered(generate(), token_ids=[2**31]), "malformed"),
        (altered(generate(), token_ids=["1"]), "malformed"),
        (altered(generate(), room=2**63), "malformed"),
        (altered(generate(), attempt=-1), "malformed"),
        (altered(generate(), seed=-1), "malformed"),
        (altered(generate(), sample_index=2**31), "malformed"),
        (altered(generate(), sampling={"temperature": -1.0}), "malformed"),
        (altered(generate(), protocol_version=2), "protocol_version"),
        (altered(generate(), protocol_version=2, news="x"), "protocol_version"),
        (encode(generate(peer_epoch=EPOCH - 1)), "peer_epoch"),
        (encode(generate(epoch=PEER + 1)), "epoch"),
        (encode(WorkerReady(**HEADER, dp_rank=0)), "malformed"),
    ],
)
def test_what_is_not_meant_for_this_process_is_dropped_and_counted(frame, cause) -> None:
    inbox = reader()
    assert inbox.read(frame) is None
    assert dict(inbox.num_dropped) == {cause: 1}
    assert inbox.read(encode(generate())) == generate()


def test_another_version_is_told_by_its_number(caplog) -> None:
    reader().read(altered(generate(), protocol_version=9, news="x"))
    assert "the sender speaks version 9, this is 1" in caplog.text


def test_a_cause_is_told_once(caplog) -> None:
    inbox = reader()
    for _ in range(5):
        inbox.read(b"")
    assert inbox.num_dropped["malformed"] == 5
    assert len(caplog.records) == 1


def test_a_request_with_bad_values_can_be_answered() -> None:
    inbox = reader()
    frame = altered(generate(), sampling={"temperature": -1.0})
    (room, attempt), detail = inbox.refused_request(frame)
    assert (room, attempt) == generate().key
    assert "temperature=-1.0 is out of range" in detail
    assert inbox.refused_request(altered(generate(), seed=-1, epoch=PEER + 1)) is None
    assert inbox.refused_request(altered(generate(), seed=-1, peer_epoch=3)) is None
    assert inbox.refused_request(altered(Abort(**REQUEST), reason=3)) is None
    assert inbox.refused_request(altered(generate(), seed=-1, room=-1)) is None
    assert inbox.refused_request(b"\xc1") is None
    assert inbox.refused_request(encode(generate())) is None


@given(st.binary(max_size=400))
def test_random_bytes_are_dropped(frame: bytes) -> None:
    assert reader().read(frame) is None


@given(st.data())
def test_a_damaged_message_is_never_another_request(data) -> None:
    """A changed byte gives the same kind of message with other values, or nothing; no error."""
    frame = bytearray(encode(generate(token_ids=[1, 2, 300], request_id="abc")))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] = data.draw(st.integers(0, 255))
    message = reader().read(bytes(frame))
    assert message is None or isinstance(message, Generate)
