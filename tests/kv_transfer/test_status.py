"""Merge rules and consensus of statuses (reference section 10, item 33)."""

import itertools

import pytest

from inferkit.kv_transfer.status import KVStatus, Vote, decode_votes, encode_votes, update


def test_values_are_those_of_the_reference() -> None:
    assert [(status.name, status.value) for status in KVStatus] == [
        ("FAILED", 0),
        ("BOOTSTRAPPING", 1),
        ("WAITING_FOR_INPUT", 2),
        ("TRANSFERRING", 3),
        ("SUCCESS", 4),
    ]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(KVStatus, KVStatus)))
def test_failed_absorbs_and_everything_else_grows(old: KVStatus, new: KVStatus) -> None:
    merged = update(old, new)
    if KVStatus.FAILED in (old, new):
        assert merged is KVStatus.FAILED
    else:
        assert merged == max(old, new)
        assert update(old, KVStatus.BOOTSTRAPPING) is old  # never overwrites


def common(*vectors: list[int]) -> list[int]:
    return [min(entries) for entries in zip(*vectors, strict=True)]


def test_one_failed_rank_fails_the_record_on_all() -> None:
    keys = [(1, 7), (2, 7)]
    ranks = [
        encode_votes(keys, [Vote(KVStatus.SUCCESS, True), Vote(KVStatus.SUCCESS)]),
        encode_votes(keys, [Vote(KVStatus.FAILED, True), Vote(KVStatus.SUCCESS, True)]),
    ]
    assert decode_votes(common(*ranks)) == [
        Vote(KVStatus.FAILED, True),
        Vote(KVStatus.SUCCESS, False),
    ]


def test_no_records_are_a_vector_too() -> None:
    assert decode_votes(encode_votes([], [])) == []


def test_ranks_that_vote_on_other_requests_are_found() -> None:
    vote = [Vote(KVStatus.SUCCESS)]
    with pytest.raises(ValueError, match="voted on different requests"):
        decode_votes(common(encode_votes([(1, 7)], vote), encode_votes([(1, 8)], vote)))
