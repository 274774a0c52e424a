"""Rules of a prefill rank, one by one; their interplay is in test_schedules.py."""

from typing import Any

import pytest

from inferkit.core.errors import RequestError
from inferkit.core.protocols import WriteState
from inferkit.core.transfer_messages import DrainAck, Status, TransferState
from inferkit.kv_transfer.actions import (
    CancelWrites,
    Code,
    End,
    FirstToken,
    PostBlocks,
    PostSlot,
    Ready,
    Release,
    Send,
)
from inferkit.kv_transfer.decode_book import MAX_LIVES
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, make_attempt
from inferkit.kv_transfer.metadata_slot import SlotPayload
from inferkit.kv_transfer.prefill_record import PrefillPhase
from tests.kv_transfer.ranks_alone import (
    KEY,
    TIMERS,
    TOKEN,
    D,
    Prefill,
    abort,
    handshake,
    only,
    renew,
    sent,
    states,
)


def test_a_request_from_generate_to_the_end() -> None:
    prefill = Prefill()
    assert prefill.accept() == []
    assert prefill.tick() == []  # its Handshake is missing
    (send,) = prefill.records.on_message(handshake())
    assert isinstance(send, Send) and (send.peer, send.rank) == (D, 0)
    assert send.reply_address == "tcp://d"
    assert states([send]) == [TransferState.READY]
    assert prefill.tick() == [Ready(KEY)]
    prefill.records.begin(KEY)

    (blocks,) = prefill.records.complete(KEY, TOKEN)
    assert isinstance(blocks, PostBlocks)
    assert (blocks.first_token, blocks.end_token, blocks.is_last) == (0, 10, True)
    assert blocks.handshake.block_ids["full_attention"] == (4, 5, 6)
    (body,) = prefill.records.on_write_ended(blocks.write_id, WriteState.DONE)
    assert isinstance(body, PostSlot) and body.offset == 8
    (word,) = prefill.records.on_write_ended(body.write_id, WriteState.DONE)
    assert isinstance(word, PostSlot) and word.offset == 0
    assert SlotPayload.unpack(word.data + body.data) == SlotPayload(1, KEY.room, 7, 10)
    assert only(prefill.tick(), End) == []  # the commit word is not placed yet

    actions = prefill.records.on_write_ended(word.write_id, WriteState.DONE)
    (status,) = sent(actions, Status)
    assert (status.state, status.first_token, status.seed) == (TransferState.OK, 7, 3)
    assert prefill.tick() == [End(KEY, Code.OK), Release(KEY, blocks=True)]
    assert prefill.records.records == {}


def test_the_last_status_is_repeated_after_the_end() -> None:
    prefill = Prefill()
    prefill.sending()
    prefill.done(prefill.records.complete(KEY, TOKEN))
    prefill.tick()
    assert states(prefill.records.on_message(renew(1))) == [TransferState.OK]
    assert states(prefill.records.on_message(handshake())) == [TransferState.OK]
    assert prefill.records.on_message(renew(floor=2)) == []
    assert prefill.records.books.num_tombstones == 0
    assert prefill.records.on_message(renew(1, floor=2)) == []


def test_chunks_travel_as_they_are_computed_and_each_block_once() -> None:
    prefill = Prefill()
    first, second = only(prefill.sending(num_chunks=2), PostBlocks)
    assert [(c.first_token, c.end_token, c.is_last) for c in (first, second)] == [
        (0, 4, False),
        (4, 8, False),
    ]
    (last,) = only(prefill.records.complete(KEY, TOKEN), PostBlocks)
    assert (last.first_token, last.end_token, last.is_last) == (8, 10, True)
    assert prefill.records.on_write_ended(last.write_id, WriteState.DONE) == []
    assert prefill.records.on_write_ended(first.write_id, WriteState.DONE) == []
    (body,) = prefill.records.on_write_ended(second.write_id, WriteState.DONE)
    assert isinstance(body, PostSlot)


def test_a_handshake_may_come_before_its_generate() -> None:
    prefill = Prefill()
    assert states(prefill.records.on_message(handshake())) == [TransferState.READY]
    assert states(prefill.records.on_message(renew(1))) == [TransferState.READY]
    assert states(prefill.accept()) == [TransferState.READY]
    assert prefill.tick() == [Ready(KEY)]


def test_a_stray_handshake_is_dropped_in_time() -> None:
    prefill = Prefill()
    prefill.records.on_message(handshake())
    prefill.after(TIMERS.stash_s - 1)
    assert prefill.records.books.num_stashed == 1
    prefill.after(1)
    assert prefill.records.books.num_stashed == 0
    assert prefill.records.num_dropped == {"stash_timeout": 1}
    assert prefill.records.on_message(renew(1)) == []


def test_a_stashed_handshake_of_another_epoch_is_not_bound() -> None:
    prefill = Prefill()
    prefill.records.on_message(handshake(epoch=23))
    prefill.accept()
    assert prefill.tick() == []
    prefill.records.on_message(handshake(epoch=24))
    assert prefill.records.num_dropped == {"not_pinned": 1}


def test_an_abort_that_overtakes_its_handshake_leaves_a_tombstone() -> None:
    prefill = Prefill()
    assert [m.transfer_id for m in sent(prefill.records.on_message(abort()), DrainAck)] == [1]
    assert prefill.records.on_message(handshake()) == []
    assert prefill.records.num_dropped == {"tombstone": 1}
    assert only(prefill.accept(), End) == []
    (end,) = only(prefill.tick(), End)
    assert (end.code, end.reason) == (Code.UNAVAILABLE, "decode aborted it before it came")
    assert len(sent(prefill.records.on_message(abort()), DrainAck)) == 1


def test_below_the_floor_everything_is_refused_for_good() -> None:
    prefill = Prefill()
    prefill.records.on_message(abort())
    prefill.records.on_message(renew(floor=2))
    assert prefill.records.books.num_tombstones == 0
    assert prefill.records.on_message(handshake()) == []
    assert len(sent(prefill.records.on_message(abort()), DrainAck)) == 1
    assert prefill.records.books.num_tombstones == 0
    prefill.records.on_message(handshake(3, floor=1))  # an old floor does not lower it
    assert prefill.records.on_message(handshake()) == []
    assert prefill.records.num_dropped["below_floor"] == 2


def test_an_aborted_link_acknowledges_when_its_last_write_has_ended() -> None:
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    actions = prefill.records.on_message(abort())
    assert sent(actions, DrainAck) == [] and states(actions) == [TransferState.FAILED]
    assert only(actions, CancelWrites) == [CancelWrites((chunk.write_id,))]
    assert prefill.records.send_chunk(KEY, 8) == []  # posts nothing more, before any tick
    (end,) = prefill.tick()
    assert end == End(KEY, Code.UNAVAILABLE, "decode aborted it")
    assert prefill.tick() == []
    actions = prefill.records.on_write_ended(chunk.write_id, WriteState.DONE)
    assert len(sent(actions, DrainAck)) == 1 and len(actions) == 1
    assert prefill.tick() == [Release(KEY, blocks=True)]


def test_a_lost_write_is_never_acknowledged_but_frees_its_source() -> None:
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    prefill.records.on_message(abort())
    prefill.tick()
    actions = prefill.records.on_write_ended(chunk.write_id, WriteState.LOST, "closed")
    assert sent(actions, DrainAck) == []
    assert prefill.tick() == [Release(KEY, blocks=True)]
    assert sent(prefill.records.on_message(abort()), DrainAck) == []


def test_a_failed_write_fails_the_request_and_tells_decode() -> None:
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    actions = prefill.records.on_write_ended(chunk.write_id, WriteState.FAILED, "refused")
    assert states(actions) == [TransferState.FAILED]
    (end,) = only(prefill.tick(), End)
    assert end.reason == "a write to rank 0 failed: refused"
    assert prefill.tick() == [Release(KEY, blocks=True)]
    assert states(prefill.records.on_message(renew(1))) == [TransferState.FAILED]


def test_a_request_that_ends_with_its_first_token_writes_nothing() -> None:
    prefill = Prefill()
    prefill.sending()
    (status,) = sent(prefill.records.finish(KEY, TOKEN), Status)
    assert (status.state, status.first_token) == (TransferState.FINISHED, 7)
    assert prefill.tick() == [End(KEY, Code.OK), Release(KEY, blocks=True)]


def test_finished_waits_for_chunks_in_flight() -> None:
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    assert prefill.records.finish(KEY, TOKEN) == []
    assert prefill.tick() == []
    actions = prefill.records.on_write_ended(chunk.write_id, WriteState.DONE)
    assert states(actions) == [TransferState.FINISHED]


def test_a_rank_without_receivers_sends_nothing() -> None:
    prefill = Prefill()
    prefill.accept()
    prefill.records.on_message(handshake(required_dst_info_num=0))
    assert prefill.tick() == [Ready(KEY)]
    prefill.records.begin(KEY)
    assert states(prefill.records.complete(KEY, TOKEN)) == [TransferState.OK]
    assert only(prefill.tick(), End) == [End(KEY, Code.OK)]


def test_every_handshake_is_needed_and_none_too_many_is_taken() -> None:
    prefill = Prefill()
    prefill.accept()
    two: dict[str, Any] = {"required_dst_info_num": 2}
    prefill.records.on_message(handshake(1, **two))
    assert prefill.tick() == []
    prefill.records.on_message(handshake(1, decode_rank=1, **two))
    prefill.records.on_message(handshake(1, decode_rank=2, **two))
    prefill.records.on_message(handshake(9, **two))
    assert prefill.records.num_dropped == {"bound": 2}
    assert prefill.tick() == [Ready(KEY)]


def test_decode_ranks_that_disagree_fail_the_request() -> None:
    prefill = Prefill()
    prefill.accept()
    prefill.records.on_message(handshake(required_dst_info_num=2))
    prefill.records.on_message(handshake(decode_rank=1, required_dst_info_num=3))
    (end,) = only(prefill.tick(), End)
    assert end.reason == "decode rank 1 says required_dst_info_num=3, another one 2"


def test_a_failed_rank_fails_the_others() -> None:
    """Here the rank itself sees nothing wrong: the minimum says so."""
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    vector = prefill.records.votes()
    vector[2] = 0
    actions = prefill.records.decide(vector)
    assert only(actions, End) == [End(KEY, Code.UNAVAILABLE, "it failed on another rank")]
    assert states(actions) == [TransferState.FAILED]
    prefill.records.on_write_ended(chunk.write_id, WriteState.DONE)
    vector = prefill.records.votes()
    assert vector[3] == 1
    vector[3] = 0  # another rank still writes
    assert prefill.records.decide(vector) == []
    assert prefill.tick() == [Release(KEY, blocks=True)]


# -- admission -------------------------------------------------------------------------------------


def test_a_request_for_a_former_life_is_answered_503() -> None:
    prefill = Prefill()
    pair = PinnedPair(Peer("p", 10), D)
    (end,) = prefill.records.accept(KEY, pair, remaining_ms=1000)
    assert isinstance(end, End) and end.code is Code.UNAVAILABLE
    assert prefill.records.records == {}


def test_a_room_of_another_router_is_refused_and_a_retry_is_not() -> None:
    prefill = Prefill()
    prefill.accept()
    other = TransferKey(KEY.room, make_attempt(2, 1))
    (end,) = prefill.accept(other)
    assert isinstance(end, End) and end.code is Code.CONFLICT
    assert prefill.accept(TransferKey(KEY.room, make_attempt(1, 2))) == []
    assert len(prefill.records.records) == 2


def test_a_room_that_is_aborting_is_not_active() -> None:
    prefill = Prefill()
    prefill.sending(num_chunks=1)
    prefill.records.cancel(KEY)
    assert prefill.records.records[KEY].phase is PrefillPhase.ABORTING
    assert prefill.accept(TransferKey(KEY.room, make_attempt(2, 1))) == []


def test_an_attempt_is_used_once() -> None:
    prefill = Prefill()
    prefill.accept()
    with pytest.raises(RequestError, match="room=5 attempt=4294967297 was used before"):
        prefill.accept()


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_refused_request_answers_its_handshakes(comes_first: bool) -> None:
    prefill = Prefill()
    actions = []
    if comes_first:
        prefill.records.on_message(handshake())
    actions += prefill.records.refuse(KEY, D, "too long")
    if not comes_first:
        actions += prefill.records.on_message(handshake())
    assert only(actions, End) == [End(KEY, Code.REFUSED, "too long")]
    assert states(actions) == [TransferState.FAILED]
    assert states(prefill.records.on_message(renew(1))) == [TransferState.FAILED]
    prefill.after(TIMERS.stash_s)
    assert prefill.records._ended == {}


# -- epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [handshake(peer_epoch=10), abort(peer_epoch=10)])
def test_what_is_for_a_former_life_gets_no_answer(message: Any) -> None:
    prefill = Prefill()
    assert prefill.records.on_message(message) == []
    assert prefill.records.num_dropped == {"peer_epoch": 1}


def test_old_lives_of_decode_are_forgotten_but_stay_refused() -> None:
    prefill = Prefill()
    for epoch in range(100, 100 + MAX_LIVES + 1):
        prefill.records.on_message(abort(epoch=epoch))
    assert prefill.records.books.num_tombstones == MAX_LIVES
    assert prefill.records.on_message(handshake(epoch=100)) == []
    assert prefill.records.on_message(abort(epoch=100)) == []
    assert prefill.records.num_dropped == {"retired": 2}
    assert len(prefill.records.on_message(abort(epoch=101))) == 1


def test_a_life_with_a_transfer_in_progress_is_not_forgotten() -> None:
    prefill = Prefill()
    prefill.sending()
    for epoch in range(100, 100 + 2 * MAX_LIVES):
        prefill.records.on_message(abort(epoch=epoch))
    prefill.done(prefill.records.complete(KEY, TOKEN))
    assert only(prefill.tick(), End) == [End(KEY, Code.OK)]


# -- timers and cancels ----------------------------------------------------------------------------


def test_handshakes_are_awaited_for_a_time() -> None:
    prefill = Prefill()
    prefill.accept()
    prefill.after(TIMERS.handshake_timeout_s - 1)
    assert prefill.tick() == []
    prefill.after(1)
    (end,) = prefill.tick()
    assert isinstance(end, End) and end.code is Code.UNAVAILABLE
    assert "0 of its Handshakes of decode d came in time" in end.reason
    assert states(prefill.records.on_message(handshake())) == [TransferState.FAILED]


def test_a_request_with_less_time_waits_less() -> None:
    prefill = Prefill()
    prefill.accept(remaining_s=5)
    prefill.after(5)
    assert only(prefill.tick(), End)


def test_decode_that_falls_silent_is_given_up() -> None:
    prefill = Prefill()
    (chunk,) = only(prefill.sending(num_chunks=1), PostBlocks)
    prefill.renewed(200, 1)
    assert prefill.tick() == []
    prefill.after(TIMERS.silence_s)
    (end,) = only(prefill.tick(), End)
    assert end.reason == "decode rank 0 was silent for 60.0 s"
    assert prefill.tick() == []  # the write is still in flight
    prefill.records.on_write_ended(chunk.write_id, WriteState.FAILED)
    assert prefill.tick() == [Release(KEY, blocks=True)]


def test_a_renewal_of_other_transfers_renews_nothing() -> None:
    prefill = Prefill()
    prefill.sending(num_chunks=1)
    prefill.renewed(60, 2)
    assert only(prefill.tick(), End)


def test_a_transfer_that_is_over_at_decode_is_given_up() -> None:
    prefill = Prefill()
    prefill.sending(num_chunks=1)
    prefill.records.on_message(renew(floor=2))
    (end,) = only(prefill.tick(), End)
    assert end.reason == "it is over at decode"


def test_the_deadline_of_the_request_ends_it() -> None:
    prefill = Prefill()
    prefill.accept(remaining_s=100)
    prefill.records.on_message(handshake())
    prefill.tick()
    prefill.renewed(100, 1)
    (end,) = only(prefill.tick(), End)
    assert end.reason == "its time is over"


@pytest.mark.parametrize("phase", ["bootstrapping", "ready", "sending", "aborting", "unknown"])
def test_a_cancel_releases_everything_in_every_phase(phase: str) -> None:
    prefill = Prefill()
    expected = [Release(KEY, blocks=True)] if phase in ("sending", "aborting") else []
    if phase in ("bootstrapping", "ready"):
        prefill.accept()
    if phase == "ready":
        prefill.records.on_message(handshake())
        prefill.tick()
    if phase in ("sending", "aborting"):
        prefill.sending()
    if phase == "aborting":
        prefill.records.cancel(KEY)
    actions = only(prefill.records.cancel(KEY), End)
    is_open = phase not in ("aborting", "unknown")
    assert [end.code for end in actions] == [Code.CANCELLED] * is_open
    assert prefill.tick() == expected
    assert prefill.records.records == {}
    assert prefill.records.cancel(KEY) == []


def test_drafts_travel_in_the_slot_as_far_as_it_has_room() -> None:
    prefill = Prefill()
    prefill.sending()
    token = FirstToken(token_id=7, kv_len=10, draft_token_ids=(1, 2))
    (chunk,) = only(prefill.records.complete(KEY, token), PostBlocks)
    (body,) = only(prefill.records.on_write_ended(chunk.write_id, WriteState.DONE), PostSlot)
    payload = SlotPayload.unpack(bytes([1, *[0] * 7]) + body.data)
    assert payload is not None and payload.draft_token_ids == (1, 2)
    with pytest.raises(ValueError, match="8 draft tokens do not fit"):
        FirstToken(token_id=7, kv_len=10, draft_token_ids=tuple(range(8)))


def test_the_digest_travels_with_ok_only() -> None:
    prefill = Prefill(digest=lambda key, message: f"{key.room}/{message.transfer_id}")
    assert [s.digest for s in sent(prefill.sending(), Status)] == []
    statuses = sent(prefill.done(prefill.records.complete(KEY, TOKEN)), Status)
    assert [(s.state, s.digest) for s in statuses] == [(TransferState.OK, "5/1")]
