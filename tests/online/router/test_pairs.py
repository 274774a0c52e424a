"""Which instances there are, which pairs take requests, and which one is chosen."""

from collections import Counter

import pytest

from inferkit.core.messages import PROTOCOL_VERSION
from inferkit.online.facts import InstanceFacts, Side, read_facts
from inferkit.online.router.breaker import MAX_OPEN_S, Breaker, BreakerState
from inferkit.online.router.pairs import PairTable, Policy, hash_of
from inferkit.online.router.registry import EXPIRY_S, LOST_S, Registry
from inferkit.online.router.route import AttemptNumbers
from inferkit.online.router.routed_request import Failed, Fault, LegFailure

P1, P2, D1, D2 = (f"http://{name}:1" for name in ("p1", "p2", "d1", "d2"))


class VirtualClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def facts(url, epoch=1, **changes):
    side = Side.PREFILL if "//p" in url else Side.DECODE
    values = {
        "url": url,
        "side": side,
        "instance_id": f"{url[7:9]}-{epoch}",
        "epoch": epoch,
        "bootstrap_url": f"http://b{url[8]}:2" if side is Side.PREFILL else "",
    }
    return InstanceFacts(**(values | changes))


def make(prefills=(P1, P2), decodes=(D1, D2), policy=Policy.HASH):
    clock = VirtualClock()
    registry = Registry(prefill_urls=prefills, decode_urls=decodes, clock=clock, model="a")
    for url in (*prefills, *decodes):
        registry.answered(url, facts(url))
    pairs = PairTable(registry=registry, policy=policy, clock=clock)
    pairs.refresh()
    for route in pairs.probes_due():
        pairs.end_probe(route, "")
    return registry, pairs, clock


# -- the registry --------------------------------------------------------------------------------


def test_listed_instances_are_missing_until_they_answer():
    clock = VirtualClock()
    registry = Registry(prefill_urls=[P1], decode_urls=[D1], clock=clock)
    assert len(registry.missing()) == 2 and "not asked yet" in registry.missing()[0]
    registry.missed(P1, "connection refused", is_definite=True)
    assert registry.missing()[0] == (
        f"no prefill instance takes requests: {P1} (connection refused)"
    )
    registry.answered(P1, facts(P1))
    registry.answered(D1, facts(D1, state="starting"))
    assert registry.missing() == [f"no decode instance takes requests: {D1} (it is starting)"]
    registry.answered(D1, facts(D1))
    assert registry.missing() == [] and registry.bootstrap_urls() == ["http://b1:2"]


def test_a_late_answer_counts_three_times_and_a_refused_connection_at_once():
    registry, _, _ = make()
    for _ in range(2):
        registry.missed(D1, "late", is_definite=False)
        assert registry.is_usable(D1)
    registry.answered(D1, facts(D1))
    for count in range(3):
        assert registry.is_usable(D1), count
        registry.missed(D1, "late", is_definite=False)
    assert not registry.is_usable(D1)
    registry.missed(D2, "refused", is_definite=True)
    assert not registry.is_usable(D2)


def test_another_life_at_the_same_address_is_another_peer_at_once():
    registry, pairs, _ = make()
    assert registry.answered(D1, facts(D1)) == []
    assert registry.answered(D1, facts(D1, epoch=2)) == [("d1-1", 1)]
    pairs.refresh()
    states = Counter(entry["breaker"] for entry in pairs.stats())
    assert states == {"closed": 2, "unproven": 2}, "it is proven again before clients use it"
    assert registry.join(facts(D2, epoch=3)) == [("d2-1", 1)]


def test_the_same_instance_at_another_address_is_known_there_only():
    registry, _, _ = make()
    moved = facts("http://d9:1", instance_id="d1-1", epoch=1)
    assert registry.join(moved) == []
    assert [entry.url for entry in registry.usable(Side.DECODE)] == [D2, "http://d9:1"]


def test_who_has_joined_is_forgotten_when_it_is_silent():
    clock = VirtualClock()
    registry = Registry(prefill_urls=[], decode_urls=[], clock=clock)
    registry.join(facts(D1))
    clock.now_s += EXPIRY_S - 1
    registry.join(facts(D1))
    clock.now_s += EXPIRY_S - 1
    assert registry.sweep() == [] and registry.is_usable(D1)
    registry.missed(D1, "refused", is_definite=True)
    assert registry.urls == [D1]
    clock.now_s += 2
    assert registry.sweep() == [("d1-1", 1)] and registry.urls == []


def test_a_listed_one_that_is_silent_is_given_up_but_asked_for_ever():
    registry, _, clock = make()
    clock.now_s += LOST_S - 1
    for url in (P1, P2, D2):
        registry.answered(url, facts(url))
    clock.now_s += 2
    assert registry.sweep() == [("d1-1", 1)]
    assert registry.sweep() == [] and D1 in registry.urls
    registry.answered(D1, facts(D1))
    assert registry.is_usable(D1)


def test_tokens_of_a_leg_are_a_sign_of_life():
    registry, _, clock = make([P1], [D1])
    clock.now_s += LOST_S - 1
    registry.heard(facts(D1).peer)
    clock.now_s += 2
    assert registry.sweep() == [facts(P1).peer]


def test_leaving_is_no_loss_and_coming_back_is_no_surprise():
    registry, _, _ = make()
    assert registry.leave("d1-1") and not registry.leave("d1-1")
    assert not registry.is_usable(D1) and "it has left" in str(registry.stats())
    registry.answered(D1, facts(D1, state="draining"))
    assert not registry.is_usable(D1)
    registry.answered(D1, facts(D1, epoch=2))
    assert registry.is_usable(D1)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (facts(D1, protocol_version=PROTOCOL_VERSION + 1), "run the same release"),
        (facts(P1, side=Side.DECODE), "is known as a prefill instance"),
        (facts(D1, model="b"), "computes model.name='b', the router tokenises for 'a'; start both"),
    ],
)
def test_who_does_not_fit_may_not_join(entry, words):
    registry, _, _ = make()
    with pytest.raises(ValueError, match=words):
        registry.join(entry)


def test_who_answers_as_another_role_is_not_used():
    registry, _, _ = make()
    assert registry.answered(P1, facts(P1, side=Side.DECODE)) == [("p1-1", 1)]
    registry.missed(P2, "refused", is_definite=True)
    assert "it is a decode instance; the router takes it for prefill" in registry.missing()[0]


def test_facts_survive_json():
    entry = facts(P1, epoch=2**64 - 1, state="draining", model="m")
    assert read_facts(entry.to_json()) == entry
    assert read_facts(entry.to_json() | {"url": None}, url=P1) == entry


# -- choice --------------------------------------------------------------------------------------


def test_the_hash_spreads_over_all_pairs_and_is_the_same_everywhere():
    _, pairs, _ = make()
    chosen = Counter(pairs.choose(room, 1).key for room in range(4000))
    assert len(chosen) == 4 and max(chosen.values()) < 1.15 * min(chosen.values())
    _, others, _ = make([P2, P1], [D2, D1])
    assert all(pairs.choose(room, 5).key == others.choose(room, 5).key for room in range(50))
    assert len({pairs.choose(1, attempt).key for attempt in range(50)}) == 4
    assert hash_of(1, 2) == 15707266481197200890


def failed_at(route, side):
    return Failed(route, side, LegFailure(Fault.BROKEN, "broken"))


@pytest.mark.parametrize("side", list(Side))
def test_a_retry_goes_past_the_instance_that_failed(side):
    _, pairs, _ = make()
    for room in range(50):
        first = pairs.choose(room, 1)
        again = pairs.choose(room, 2, [failed_at(first, side)])
        assert again.side(side) != first.side(side)


def test_a_retry_takes_another_pair_where_it_can_and_else_the_same():
    _, pairs, _ = make([P1, P2], [D1])
    first = pairs.choose(1, 1)
    again = pairs.choose(1, 2, [failed_at(first, Side.DECODE)])
    assert again.key != first.key
    failed = [failed_at(first, Side.DECODE), failed_at(again, Side.DECODE)]
    assert pairs.choose(1, 3, failed) is not None
    _, pairs, _ = make([P1], [D1])
    first = pairs.choose(1, 1)
    assert pairs.choose(1, 2, [failed_at(first, Side.PREFILL)]).key == first.key


def test_the_least_loaded_of_both_sides():
    _, pairs, _ = make(policy=Policy.LEAST_LOADED)
    pairs.outstanding[facts(P1).peer] = 10
    pairs.outstanding[facts(D2).peer] = 1
    chosen = pairs.choose(1, 1)
    assert (chosen.prefill.url, chosen.decode.url) == (P2, D1)
    assert len({pairs.choose(1, n, []).prefill.url for n in range(9)}) == 1


def test_an_attempt_number_comes_once():
    numbers = AttemptNumbers()
    drawn = [numbers.next() for _ in range(1000)]
    assert len(set(drawn)) == 1000 and len({number >> 32 for number in drawn}) == 1
    assert AttemptNumbers().next() not in drawn
    numbers._counter = 1 << 32
    assert numbers.next() >> 32 != drawn[0] >> 32


# -- breakers ------------------------------------------------------------------------------------


def test_a_pair_is_probed_before_it_is_used():
    registry, pairs, _ = make([P1], [D1])
    registry.answered(D2, facts(D2))
    registry.join(facts(D2))
    pairs.refresh()
    assert {pairs.choose(room, 1).decode.url for room in range(50)} == {D1}
    (route,) = pairs.probes_due()
    assert route.decode.url == D2 and pairs.probes_due() == []
    pairs.end_probe(route, "no")
    assert {pairs.choose(room, 1).decode.url for room in range(50)} == {D1}


def test_failures_in_a_row_open_it_for_longer_and_longer():
    breaker = Breaker(threshold=3)
    assert breaker.probe_due_s() == float("-inf")
    breaker.begin_probe()
    assert breaker.probe_due_s() is None and not breaker.is_closed
    breaker.end_probe("", 0.0)
    for _ in range(2):
        breaker.fail("x", 0.0)
    breaker.succeed()
    for count in range(3):
        assert breaker.is_closed, count
        breaker.fail("x", 0.0)
    assert breaker.state is BreakerState.OPEN and breaker.probe_due_s() == 1.0
    breaker.fail("of a request that began before", 0.5)
    breaker.succeed()
    assert breaker.state is BreakerState.OPEN and breaker.probe_due_s() == 1.0
    waits = []
    now_s = 1.0
    for _ in range(6):
        breaker.begin_probe()
        breaker.end_probe("still broken", now_s)
        waits.append(breaker.probe_due_s() - now_s)
    assert waits == [2.0, 4.0, 8.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]
    breaker.begin_probe()
    breaker.end_probe("", now_s)
    assert breaker.is_closed and breaker.num_failures == 0 and breaker.last_error == ""


def test_one_bad_pair_leaves_its_instances_to_others():
    _, pairs, clock = make()
    bad = pairs.choose(1, 1)
    for _ in range(3):
        pairs.report(bad, failed_at(bad, Side.DECODE))
    chosen = {pairs.choose(room, 1).key for room in range(100)}
    assert len(chosen) == 3 and bad.key not in chosen
    assert pairs.next_probe_s() == clock.now_s + 1.0 and pairs.probes_due() == []
    clock.now_s += 1
    assert [route.key for route in pairs.probes_due()] == [bad.key]


def test_many_restarts_leave_nothing_behind():
    registry, pairs, clock = make()
    for epoch in range(2, 60):
        registry.answered(D1, facts(D1, epoch=epoch))
        registry.join(facts(f"http://d{epoch}x:1", epoch=epoch))
        pairs.refresh()
        for route in pairs.probes_due():
            pairs.outstanding[route.decode.peer] += 5
            pairs.end_probe(route, "" if epoch % 2 else "no")
            pairs.outstanding[route.decode.peer] -= 5
        clock.now_s += LOST_S
        registry.missed(f"http://d{epoch}x:1", "refused", is_definite=True)
        for url in (P1, P2, D2):
            registry.answered(url, facts(url))
        registry.sweep()
    assert len(registry.urls) <= 6
    pairs.refresh()
    assert len(pairs.stats()) == 4 and len(pairs._breakers) <= 8
    assert len(pairs.outstanding) <= 6


def test_a_breaker_survives_a_moment_without_contact():
    registry, pairs, clock = make()
    bad = pairs.choose(1, 1)
    for _ in range(3):
        pairs.report(bad, failed_at(bad, Side.DECODE))
    registry.missed(bad.decode.url, "refused", is_definite=True)
    pairs.refresh()
    assert pairs.missing() == []
    registry.answered(bad.decode.url, bad.decode)
    pairs.refresh()
    assert bad.key not in {pairs.choose(room, 1).key for room in range(100)}
