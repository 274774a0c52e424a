"""Attempts, rooms and timers."""

import pytest

from inferkit.core.errors import ConfigError
from inferkit.kv_transfer.identity import TransferKey, is_rival, make_attempt
from inferkit.kv_transfer.timers import TransferTimers


def test_attempts_of_two_routers_never_meet() -> None:
    attempts = {make_attempt(nonce, counter) for nonce in (0, 1, 2**32 - 1) for counter in (0, 9)}
    assert len(attempts) == 6 and max(attempts) < 2**64
    assert TransferKey(1, make_attempt(7, 3)).router == 7
    with pytest.raises(ValueError, match="each has 32 bits"):
        make_attempt(1, 2**32)


def test_a_retry_is_no_rival() -> None:
    key = TransferKey(1, make_attempt(7, 3))
    assert not is_rival(key, TransferKey(1, make_attempt(7, 4)))
    assert is_rival(key, TransferKey(1, make_attempt(8, 3)))
    assert not is_rival(key, TransferKey(2, make_attempt(8, 3)))


def test_timers_follow_from_the_lease() -> None:
    timers = TransferTimers(lease_s=9.0)
    assert (timers.renew_interval_s, timers.silence_s) == (3.0, 18.0)
    with pytest.raises(ConfigError, match=r"disagg\.stash_s=0 must be greater than 0 seconds"):
        TransferTimers(stash_s=0)
