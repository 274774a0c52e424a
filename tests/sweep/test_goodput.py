import pytest

from inferkit.sweep.goodput import (
    RequestTimes,
    attainment,
    goodput,
    is_good,
    limits_text,
    offered,
)

LIMITS = {"ttft_s": 0.5, "tpot_s": 0.05}


def times(**changes: float | bool | None) -> RequestTimes:
    values = {"is_finished": True, "ttft_s": 0.4, "tpot_s": 0.04, "e2e_s": 2.0}
    return RequestTimes(**{**values, **changes})


@pytest.mark.parametrize(
    ("request_times", "expected"),
    [
        (times(), True),
        (times(ttft_s=0.5, tpot_s=0.05), True),
        (times(ttft_s=0.51), False),
        (times(tpot_s=0.051), False),
        (times(e2e_s=1e6), True),  # without a limit
        (times(tpot_s=None), True),  # one token
        (times(ttft_s=None), False),
        (times(is_finished=False), False),
    ],
)
def test_a_good_request_keeps_every_limit(request_times: RequestTimes, expected: bool) -> None:
    assert is_good(request_times, LIMITS) is expected


def test_limits_are_scaled() -> None:
    assert not is_good(times(ttft_s=0.9), LIMITS)
    assert is_good(times(ttft_s=0.9), LIMITS, scale=2.0)


def test_goodput_counts_good_requests_per_second_and_device() -> None:
    requests = [times()] * 6 + [times(ttft_s=3.0)] * 2

    assert attainment(requests, LIMITS) == 0.75
    assert goodput(requests, LIMITS, wall_time_s=3.0) == 2.0
    assert goodput(requests, LIMITS, wall_time_s=3.0, num_devices=4) == 0.5
    assert goodput(requests, LIMITS, wall_time_s=3.0, scale=10.0) == pytest.approx(8 / 3)


def test_nothing_is_known_without_requests_or_time() -> None:
    assert attainment([], LIMITS) is None
    assert goodput([], LIMITS, wall_time_s=3.0) is None
    assert goodput([times()], LIMITS, wall_time_s=None) is None
    assert goodput([times()], LIMITS, wall_time_s=0.0) is None


@pytest.mark.parametrize(
    ("record", "is_finished"),
    [
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "stop", "error": None}, True),
        ({"finish_reason": "refused"}, False),
        ({"finish_reason": "abort"}, False),
        ({"finish_reason": None}, False),
        ({"finish_reason": "stop", "error": "connection lost"}, False),
    ],
)
def test_a_request_that_gave_nothing_is_not_finished(
    record: dict[str, str | None], is_finished: bool
) -> None:
    assert RequestTimes.from_record(record).is_finished is is_finished


def test_limits_are_told_in_the_order_of_a_request() -> None:
    assert limits_text({"e2e_s": 20.0, "ttft_s": 0.5}) == "TTFT <= 500 ms, E2E <= 20 s"


def test_goodput_never_beats_what_was_sent() -> None:
    """Of five requests at a rate of 4, whose gaps came out shorter than 0.25 s."""
    requests = [times(sent_s=sent_s) for sent_s in (0.0, 0.1, 0.3, 0.35, 0.8)]

    rate = offered(requests)
    good = goodput(requests, LIMITS, wall_time_s=0.8 + 0.1)

    assert rate == 5 / 0.8 and good is not None and 4 < good < rate


@pytest.mark.parametrize("sent", [[], [1.0], [1.0, 1.0], [None, None]])
def test_without_a_duration_no_rate_is_known(sent: list[float | None]) -> None:
    assert offered([times(sent_s=one) for one in sent]) is None
