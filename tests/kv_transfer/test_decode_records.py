"""Rules of a decode rank, one by one; their interplay is in test_schedules.py."""

from typing import Any

import pytest

from inferkit.core.errors import RequestError
from inferkit.core.transfer_messages import (
    Handshake,
    LeaseRenew,
    Status,
    TransferAbort,
    TransferState,
)
from inferkit.kv_transfer.actions import (
    CloseTransfer,
    Code,
    End,
    Fence,
    Finished,
    Landed,
    OpenTransfer,
    Release,
    Retracted,
    Send,
)
from inferkit.kv_transfer.decode_record import DecodePhase, DecodeRecord
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, make_attempt
from inferkit.kv_transfer.rank_mapping import LinkTarget
from tests.kv_transfer.ranks_alone import (
    KEY,
    TIMERS,
    Decode,
    P,
    drain_ack,
    only,
    sent,
    status,
)

OK, FINISHED, FAILED = TransferState.OK, TransferState.FINISHED, TransferState.FAILED
KEY2 = TransferKey(6, make_attempt(1, 2))
TWO_LINKS = (LinkTarget(0, 1), LinkTarget(1, 1))


def test_a_request_from_generate_to_the_end() -> None:
    decode = Decode()
    assert decode.accept() == []
    assert decode.records.admissible() == []
    assert decode.tick() == []
    assert decode.records.admissible() == [KEY]

    opened, send = decode.records.admit(KEY, {"full_attention": (4, 5, 6)})
    assert opened == OpenTransfer(1)  # before the Handshake: a write may come at once
    assert isinstance(send, Send) and (send.peer, send.rank) == (P, 0)
    message = send.message
    assert isinstance(message, Handshake)
    assert (message.room, message.attempt, message.peer_epoch) == (*KEY, P.epoch)
    assert (message.transfer_id, message.floor, message.slot) == (1, 1, 0)
    assert message.block_ids == {"full_attention": (4, 5, 6)}
    assert message.remaining_ms == 1_000_000

    assert decode.tick() == []
    decode.write_slot()
    decode.records.on_message(status(OK))
    landed, closed = decode.tick()
    assert isinstance(landed, Landed) and landed.slot.first_token == 7
    assert landed.status.state is OK
    assert closed == CloseTransfer(1)
    assert decode.records.slots.num_free == 4
    assert decode.records.complete(KEY) == [End(KEY, Code.OK), Release(KEY, blocks=True)]
    assert decode.records.records == {}


@pytest.mark.parametrize("slot_first", [True, False])
def test_both_slot_and_status_are_needed_in_either_order(slot_first: bool) -> None:
    decode = Decode()
    decode.admitted()
    for is_slot in (slot_first, not slot_first):
        assert decode.tick() == []
        if is_slot:
            decode.write_slot()
        else:
            decode.records.on_message(status(OK))
    assert only(decode.tick(), Landed)


def test_status_of_every_link_is_needed_and_one_twice_is_one() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK))
    decode.records.on_message(status(OK))
    assert decode.tick() == []
    decode.records.on_message(status(OK, rank=1))
    assert only(decode.tick(), Landed)


def test_a_rank_that_only_gets_told_is_not_awaited() -> None:
    decode = Decode((LinkTarget(0, 1), LinkTarget(1, 0)))
    handshakes = sent(decode.admitted(), Handshake)
    assert [(h.required_dst_info_num, bool(h.block_ids)) for h in handshakes] == [
        (1, True),
        (0, False),
    ]
    decode.write_slot()
    decode.records.on_message(status(OK))
    assert only(decode.tick(), Landed)
    decode = Decode((LinkTarget(0, 1), LinkTarget(1, 0)))
    decode.admitted()
    assert len(sent(decode.records.cancel(KEY), TransferAbort)) == 1


@pytest.mark.parametrize(
    ("slot", "told", "reason"),
    [
        ({"first_token": 8}, {}, "different first tokens"),
        ({}, {"first_token": 8}, "different first tokens"),
        ({}, {"seed": 4}, "different seeds"),
        ({"kv_len": 9}, {}, "with 9 tokens, expected are room 5 with 10"),
        ({"room": 6}, {}, "the slot is of room 6"),
    ],
)
def test_what_disagrees_does_not_run(
    slot: dict[str, Any], told: dict[str, Any], reason: str
) -> None:
    decode = Decode()
    decode.admitted()
    decode.write_slot(**slot)
    decode.records.on_message(status(OK, **told))
    (end,) = only(decode.tick(), End)
    assert end.code is Code.UNAVAILABLE and reason in end.reason


def test_a_slot_of_another_transfer_is_none() -> None:
    decode = Decode()
    decode.admitted()
    decode.write_slot(transfer_id=2)
    decode.records.on_message(status(OK))
    assert decode.tick() == []


def test_content_is_compared_once_and_a_difference_fails() -> None:
    seen: list[str] = []

    def content_fault(record: DecodeRecord, message: Status) -> str:
        seen.append(message.digest)
        return "" if message.digest == "good" else "digest differs"

    decode = Decode(content_fault=content_fault)
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK, digest="good"))
    decode.records.votes()
    assert only(decode.tick(), Landed) and seen == ["good"]
    decode = Decode(content_fault=content_fault)
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK, digest="bad"))
    (end,) = only(decode.tick(), End)
    assert end.reason == "digest differs"


def test_a_request_that_ended_with_its_first_token_needs_no_slot_and_no_drain() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.records.on_message(status(FINISHED))
    assert decode.tick() == []
    decode.records.on_message(status(FINISHED, rank=1))
    finished, end, closed, release = decode.tick()
    assert isinstance(finished, Finished) and finished.status.first_token == 7
    assert (end, closed) == (End(KEY, Code.OK), CloseTransfer(1))
    assert release == Release(KEY, blocks=True)
    assert decode.records.slots.num_free == 4


def test_ok_of_one_rank_and_finished_of_another_run_nothing() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK))
    decode.records.on_message(status(FINISHED, rank=1))
    assert decode.tick() == []
    decode.after(TIMERS.lease_s)
    assert only(decode.tick(), End)[0].code is Code.UNAVAILABLE


# -- draining --------------------------------------------------------------------------------------


def test_blocks_of_an_aborted_transfer_wait_for_drain_ack_of_every_link() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    actions = decode.records.cancel(KEY)
    assert only(actions, End) == [End(KEY, Code.CANCELLED, "cancelled")]
    assert [send.rank for send in only(actions, Send)] == [0, 1]
    decode.records.on_message(drain_ack())
    decode.records.on_message(drain_ack())
    assert decode.tick() == []
    assert [send.rank for send in only(decode.after(1.0), Send)] == [1]
    decode.records.on_message(drain_ack(rank=1))
    assert decode.tick() == [CloseTransfer(1), Release(KEY, blocks=True)]
    assert decode.records.slots.num_free == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": 12},
        {"instance_id": "q"},
        {"peer_epoch": 23},
        {"transfer_id": 2},
        {"room": 6},
        {"attempt": 1},
        {"prefill_rank": 1},
    ],
)
def test_only_the_pinned_peer_can_acknowledge(changed: dict[str, Any]) -> None:
    decode = Decode()
    decode.admitted()
    decode.records.cancel(KEY)
    decode.records.on_message(drain_ack(**changed))
    assert decode.tick() == []
    assert sum(decode.records.num_dropped.values()) == 1


def test_an_acknowledgement_that_was_not_asked_for_counts_for_nothing() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.on_message(drain_ack())
    decode.records.cancel(KEY)
    assert decode.tick() == []


def test_without_an_answer_the_transfer_is_fenced_and_only_then_freed() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.records.cancel(KEY)
    decode.records.on_message(drain_ack())
    assert only(decode.after(TIMERS.fence_timeout_s - 1), Fence) == []
    assert only(decode.after(1), Fence) == [Fence(1, P, (1,))]
    assert only(decode.after(100), Fence) == []
    assert decode.tick() == []  # time alone frees nothing
    decode.records.on_fenced(1)
    assert decode.after(1) == []
    assert decode.tick() == [Release(KEY, blocks=True)]


def test_a_drain_ack_may_still_come_while_a_fence_runs() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.cancel(KEY)
    decode.after(TIMERS.fence_timeout_s)
    decode.records.on_message(drain_ack())
    assert decode.tick() == [CloseTransfer(1), Release(KEY, blocks=True)]
    decode.records.on_fenced(1)


def test_where_no_fence_is_possible_the_blocks_stay_in_quarantine() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.cancel(KEY)
    decode.after(TIMERS.fence_timeout_s)
    decode.records.on_fence_unable(1)
    decode.after(10_000)
    assert decode.tick() == [] and decode.records.num_quarantined == 1
    decode.records.on_message(drain_ack())
    assert decode.tick() == [CloseTransfer(1), Release(KEY, blocks=True)]
    assert decode.records.num_quarantined == 0


def test_a_peer_that_is_gone_is_fenced_at_once_but_not_taken_as_drained() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.on_peer_gone(P)
    actions = decode.tick()
    assert only(actions, End)[0].reason == "prefill p is gone"
    assert only(actions, Fence) == [Fence(1, P, (0,))]
    assert decode.tick() == []


def test_a_peer_that_goes_while_its_transfer_drains_is_fenced_at_once() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.cancel(KEY)
    decode.records.on_peer_gone(P)
    assert only(decode.after(0), Fence)


def test_a_peer_that_is_back_is_given_its_time() -> None:
    decode = Decode()
    decode.records.on_peer_gone(P)
    decode.records.on_peer_back(P)
    decode.admitted()
    decode.records.cancel(KEY)
    assert only(decode.after(1), Fence) == []


def test_a_transfer_that_another_fence_broke_fails_and_is_not_drained() -> None:
    decode = Decode()
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK))
    decode.records.on_broken(1)
    assert only(decode.tick(), Landed) == []
    assert decode.records.records[KEY].phase is DecodePhase.DRAINING
    assert decode.tick() == []


def test_failed_of_prefill_ends_the_request() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.on_message(status(FAILED))
    (end,) = only(decode.tick(), End)
    assert (end.code, end.reason) == (Code.UNAVAILABLE, "prefill rank 0 failed")


# -- after landing ---------------------------------------------------------------------------------


def test_after_landing_neither_peer_nor_timer_touches_a_request() -> None:
    decode = Decode()
    decode.landed()
    decode.records.on_peer_gone(P)
    decode.records.on_broken(1)
    decode.records.on_message(status(FAILED))
    decode.after(100_000)
    assert decode.tick() == []
    assert decode.records.records[KEY].phase is DecodePhase.RUNNING


def test_a_fault_between_vote_and_decision_does_not_undo_a_landing() -> None:
    decode = Decode()
    decode.admitted()
    decode.write_slot()
    decode.records.on_message(status(OK))
    votes = decode.records.votes()
    decode.records.on_peer_gone(P)
    assert only(decode.records.decide(votes), Landed)
    assert decode.tick() == []


def test_device_blocks_are_freed_when_every_rank_has_copied() -> None:
    decode = Decode()
    decode.landed()
    decode.records.retract(KEY)
    assert decode.tick() == []
    decode.records.on_copied(KEY)
    vector = decode.records.votes()
    assert vector[3] == 1
    vector[3] = 0  # another rank still copies
    assert decode.records.decide(vector) == []
    assert decode.tick() == [Release(KEY, blocks=True), Retracted(KEY)]
    assert decode.records.resume(KEY) == [Release(KEY, host_area=True)]
    assert decode.records.complete(KEY)[-1] == Release(KEY, blocks=True)


def test_a_cancel_waits_for_the_end_of_a_copy() -> None:
    decode = Decode()
    decode.landed()
    decode.records.retract(KEY)
    assert decode.records.cancel(KEY) == [End(KEY, Code.CANCELLED)]
    assert decode.records.cancel(KEY) == []
    assert decode.tick() == []
    decode.records.on_copied(KEY)
    assert decode.tick() == [Release(KEY, blocks=True, host_area=True)]


@pytest.mark.parametrize(
    ("phase", "released"),
    [
        ("waiting", []),
        ("running", [Release(KEY, blocks=True)]),
        ("retracted", [Release(KEY, host_area=True)]),
        ("unknown", []),
    ],
)
def test_a_cancel_frees_at_once_where_nothing_can_land(phase: str, released: list[Release]) -> None:
    decode = Decode()
    if phase == "waiting":
        decode.accept()
    elif phase != "unknown":
        decode.landed()
    if phase == "retracted":
        decode.records.retract(KEY)
        decode.records.on_copied(KEY)
        decode.tick()
    actions = decode.records.cancel(KEY)
    assert only(actions, Release) == released
    assert [end.code for end in only(actions, End)] == [Code.CANCELLED] * (phase != "unknown")
    assert decode.records.records == {}


# -- admission -------------------------------------------------------------------------------------


def test_a_request_for_a_former_life_is_answered_503() -> None:
    decode = Decode()
    pair = PinnedPair(P, Peer("d", 21))
    (end,) = decode.records.accept(KEY, pair, kv_len=1, seed=0, remaining_ms=1000)
    assert isinstance(end, End) and end.code is Code.UNAVAILABLE


def test_a_room_of_another_router_is_refused_and_a_retry_is_not() -> None:
    decode = Decode()
    decode.landed()
    other = TransferKey(KEY.room, make_attempt(2, 1))
    (end,) = decode.accept(other)
    assert isinstance(end, End) and end.code is Code.CONFLICT
    assert decode.accept(TransferKey(KEY.room, make_attempt(1, 2))) == []
    with pytest.raises(RequestError, match="was used before"):
        decode.accept()


def test_a_room_that_drains_is_not_active() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.cancel(KEY)
    assert decode.accept(TransferKey(KEY.room, make_attempt(2, 1))) == []


def test_without_a_route_a_request_waits_until_its_time_is_over() -> None:
    decode = Decode()
    decode.targets = None
    decode.accept(remaining_s=50)
    decode.after(49)
    assert decode.tick() == [] and decode.records.admissible() == []
    decode.after(1)
    (end,) = decode.tick()
    assert isinstance(end, End) and end.code is Code.UNAVAILABLE
    assert end.reason == "its time is over; it waited for a route to p"
    assert decode.records.records == {}


def test_a_route_that_one_rank_does_not_know_admits_on_no_rank() -> None:
    decode = Decode()
    decode.accept()
    vector = decode.records.votes()
    vector[2] = 1
    decode.records.decide(vector)
    assert decode.records.admissible() == []


def test_a_route_that_is_lost_on_one_rank_fails_the_transfer() -> None:
    decode = Decode()
    decode.accept()
    decode.tick()
    decode.targets = None
    decode.records.admit(KEY, {})
    actions = decode.tick()
    assert only(actions, End)[0].reason == "the route to prefill is lost"
    assert decode.tick() == [CloseTransfer(1), Release(KEY, blocks=True)]  # nobody was told


def test_a_pair_that_does_not_fit_is_answered_at_once() -> None:
    decode = Decode()
    decode.targets = None
    decode.accept()
    decode.records.on_refused_pair(KEY, "dtype: prefill has 'a', decode has 'b'")
    (end,) = decode.tick()
    assert isinstance(end, End) and end.reason == "dtype: prefill has 'a', decode has 'b'"


def test_transfer_ids_count_up_and_are_told_apart_by_dp_rank() -> None:
    decode = Decode(dp_rank=1, dp_size=2)
    ids = [
        message.transfer_id
        for key in (KEY, KEY2)
        for message in sent(decode.admitted(key), Handshake)
    ]
    assert ids == [2, 4]


# -- leases ----------------------------------------------------------------------------------------


def test_leases_are_renewed_and_unanswered_handshakes_repeated() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.records.on_message(status(TransferState.READY))
    actions = decode.after(TIMERS.renew_interval_s)
    assert [(s.rank, type(s.message)) for s in only(actions, Send)] == [
        (1, Handshake),
        (0, LeaseRenew),
        (1, LeaseRenew),
    ]
    renewals = sent(actions, LeaseRenew)
    assert [r.transfer_ids for r in renewals] == [(1,), (1,)]
    assert decode.after(TIMERS.renew_interval_s - 1) == []


def test_a_draining_transfer_is_not_renewed() -> None:
    decode = Decode()
    decode.admitted()
    decode.admitted(KEY2)
    decode.records.cancel(KEY)
    (renewal,) = sent(decode.after(TIMERS.renew_interval_s), LeaseRenew)
    assert (renewal.transfer_ids, renewal.floor) == ((2,), 1)


def test_a_rank_without_live_transfers_is_told_the_floor_once() -> None:
    decode = Decode()
    decode.landed()
    (renewal,) = sent(decode.after(TIMERS.renew_interval_s), LeaseRenew)
    assert (renewal.transfer_ids, renewal.floor) == ((), 2)
    assert decode.after(TIMERS.renew_interval_s) == []


def test_the_floor_is_the_oldest_transfer_that_is_not_over() -> None:
    decode = Decode()
    assert decode.records.floor == 1
    decode.admitted()
    decode.admitted(KEY2)
    decode.records.cancel(KEY)
    assert decode.records.floor == 1
    decode.records.on_message(drain_ack())
    decode.tick()
    assert decode.records.floor == 2
    decode.records.cancel(KEY2)
    decode.records.on_fenced(2)
    decode.tick()
    assert decode.records.floor == 3


def test_a_status_extends_the_lease() -> None:
    decode = Decode()
    decode.admitted()
    for _ in range(9):
        decode.after(TIMERS.lease_s - 1)
        decode.records.on_message(status(TransferState.SENDING))
        assert decode.tick() == []
    decode.after(TIMERS.lease_s)
    (end,) = only(decode.tick(), End)
    assert end.reason == "prefill rank 0 was silent for 30.0 s"


def test_each_link_has_its_own_lease() -> None:
    decode = Decode(TWO_LINKS)
    decode.admitted()
    decode.records.on_message(status(OK))
    for _ in range(3):
        decode.after(TIMERS.lease_s - 1)
        decode.records.on_message(status(TransferState.SENDING, rank=1))
        assert decode.tick() == []  # the first has ended and owes nothing


def test_a_slot_that_stays_invisible_ends_the_transfer() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.on_message(status(OK))
    decode.after(TIMERS.lease_s - 1)
    decode.records.on_message(status(OK))  # repeated: no news, so no extension
    decode.after(1)
    (end,) = only(decode.tick(), End)
    assert end.reason == "every link ended, but the slot shows nothing after 30.0 s"


def test_what_has_landed_waits_for_a_slow_tick_without_a_lease() -> None:
    for state in (OK, FINISHED):
        decode = Decode()
        decode.admitted()
        decode.write_slot()
        decode.records.on_message(status(state))
        decode.after(4 * TIMERS.lease_s)
        assert only(decode.tick(), Landed if state is OK else Finished)


def test_a_transfer_has_a_limit() -> None:
    decode = Decode()
    decode.admitted()
    for _ in range(int(TIMERS.transfer_timeout_s) // 10):
        decode.after(10)
        decode.records.on_message(status(TransferState.SENDING))
    (end,) = only(decode.tick(), End)
    assert end.reason == "the transfer took longer than 300.0 s"


def test_an_overtaken_ready_changes_nothing() -> None:
    decode = Decode()
    decode.admitted()
    decode.records.on_message(status(TransferState.SENDING))
    decode.records.on_message(status(TransferState.READY))
    assert decode.records.records[KEY].all_links[0].state is TransferState.SENDING
    decode.records.on_message(status(OK))
    decode.records.on_message(status(FAILED))
    assert decode.records.num_dropped == {"final": 1}
