"""Random deployments, and what happens to them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from inferkit.online.facts import Side
from tests.kv_transfer.sim_engine import Faults
from tests.kv_transfer.sim_requests import Ghost
from tests.kv_transfer.sim_router import ClientRequest
from tests.kv_transfer.world import DEADLINE_S, Plan

TP_PAIRS = [(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 4)]


def random_plan(rng: Random) -> Plan:
    """Every fault in any mixture; one in seven has none, so all its requests must succeed."""
    plan = _deployment(rng)
    plan.is_calm = rng.random() < 0.15
    if plan.is_calm:
        plan.num_routers = 1
        for request in plan.requests:
            request.tries_left = 0
        return plan
    names = [f"p{i}" for i in range(plan.num_prefills)], [f"d{i}" for i in range(plan.num_decodes)]
    plan.stalls = rng.choice([0.0, 0.0, 0.05])
    plan.loses = rng.choice([0.0, 0.0, 0.1, 0.4])
    plan.doubles = rng.choice([0.0, 0.2])
    plan.late = rng.choice([0.0, 0.05, 0.3])
    plan.writes = Faults(
        delay_s=rng.choice([0.02, 0.3]),
        late=rng.choice([0.0, 0.1, 0.5]),
        fails=rng.choice([0.0, 0.0, 0.1]),
        is_lost=rng.choice([0.0, 0.0, 0.1]),
        has_peer_fence=rng.random() < 0.3,
        fence_s=rng.choice([0.0, 0.2, 5.0]),
    )
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        name = rng.choice(names[rng.random() < 0.4])
        rank = rng.choice([None, 0, 1])
        plan.crashes.append((1 + rng.random() * 12, name, rng.uniform(0.05, 6.0), rank))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        plan.bootstrap_restarts.append((1 + rng.random() * 12, rng.choice(names[0])))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        plan.hiccups.append((1 + rng.random() * 12, rng.choice(names[0]), rng.choice(names[1])))
    for idx in range(len(plan.requests)):
        if rng.random() < 0.3:
            plan.client_leaves.append((1 + rng.random() * rng.choice([0.5, 15.0]), idx))
    if rng.random() < 0.1:
        plan.router_lost_at = 1 + rng.random() * 12
    return plan


def _deployment(rng: Random) -> Plan:
    prefill_tp, decode_tp = rng.choice(TP_PAIRS)
    batch_size = rng.choice([2, 8])
    plan = Plan(
        num_prefills=rng.choice([1, 1, 2]),
        num_decodes=rng.choice([1, 1, 2]),
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        num_kv_heads=rng.choice([1, 2, 3, 4]),
        windows=rng.choice([(None,), (None,), (None,), (None, 6)]),
        prefill_blocks=rng.choice([4, 5, 9]),
        decode_blocks=rng.choice([5, 6, 9]),
        num_slots=rng.choice([1, 2, 3]),
        num_host_blocks=rng.choice([0, 2, 4, 9]),
        batch_size=batch_size,
        max_prefill_tokens=rng.choice([batch_size + 1, batch_size + 3, 64]),
        num_reserved_decode_tokens=rng.choice([0, 0, 4, 64]),
        num_routers=rng.choice([1, 1, 1, 2]),
        jitter_s=rng.choice([0.0, 0.01, 0.2]),
    )
    plan.is_http_silent = rng.random() < 0.5
    plan.first_token = rng.choice([Side.DECODE, Side.DECODE, Side.PREFILL])
    plan.is_chunked = plan.max_prefill_tokens < 64 or rng.random() < 0.5
    num_shared = rng.choice([0, 0, 4, 9])
    plan.has_prefix_cache = num_shared > 0
    for idx in range(rng.randrange(1, 6)):
        ghost = Ghost(
            request=idx,
            attempt=0,
            kv_len=rng.choice([rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(9, 17)]),
            max_tokens=rng.choice([1, 3, 3, 8, 12]),
            finishes=rng.random() < 0.12,
            num_shared=num_shared,
        )
        draw = rng.random()
        if draw < 0.04:
            ghost = replace(ghost, kv_len=4 * plan.prefill_blocks + 1)
        elif draw < 0.08:
            ghost = replace(ghost, max_tokens=4 * plan.decode_blocks + 2)
        room = rng.randrange(1, 4) if rng.random() < 0.15 else 100 + idx
        tries = rng.choice([0, 1, 2])
        plan.requests.append(ClientRequest(idx, room, DEADLINE_S, ghost, tries_left=tries))
    return plan


# -- schedules that dwell on one kind of trouble ---------------------------------------------------


def early_engine(rng: Random) -> Plan:
    """Handles end before the bytes are placed, but the cells of a link land in order. With one
    link and without aborts such an engine is safe: the slot comes last."""
    plan = _deployment(rng)
    plan.num_routers, plan.num_slots = 1, 1
    plan.prefill_tp = plan.decode_tp = 1
    plan.writes = Faults(is_early=True, delay_s=0.5)
    for idx, request in enumerate(plan.requests):
        request.room, request.tries_left = 100 + idx, 0
        request.ghost = replace(request.ghost, kv_len=1 + idx % 9, max_tokens=3, finishes=False)
    return plan


def lost_once(rng: Random) -> Plan:
    """Every message is lost the first time. Nothing else goes wrong, so every request succeeds
    without a retry."""
    plan = _deployment(rng)
    plan.is_calm, plan.loses_first, plan.num_routers = True, True, 1
    plan.prefill_blocks = plan.decode_blocks = 20
    plan.num_slots = 5
    for request in plan.requests:
        request.tries_left = 0
    return plan


def two_routers(rng: Random) -> Plan:
    """Clients that use the same rooms at the same time through two routers."""
    plan = random_plan(rng)
    plan.is_calm, plan.num_routers = False, 2
    for request in plan.requests:
        request.room = 1 + request.idx % 2
    return plan


def room_again(rng: Random) -> Plan:
    """One room, one request after another; each client leaves while messages are under way."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.late, plan.late_s, plan.loses = 0.5, 3.0, 0.2
    plan.writes = Faults(delay_s=0.3, late=0.3, late_s=5.0)
    at_s = 1.0
    for request in plan.requests:
        request.room, request.starts_at, request.tries_left = 1, at_s, 0
        at_s += rng.choice([0.05, 0.3, 1.5])
        if rng.random() < 0.8:
            plan.client_leaves.append((at_s, request.idx))
        at_s += 0.01
    return plan


def late_messages(rng: Random) -> Plan:
    """One pair, where half of all messages and HTTP calls are late and many come twice, and decode
    thinks again and again that prefill is gone."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.late, plan.late_s = 0.5, rng.choice([1.0, 6.0])
    plan.doubles, plan.loses = 0.5, 0.1
    plan.jitter_s = rng.choice([0.0, 0.2])
    for request in plan.requests:
        request.tries_left = 3
    for _ in range(4):
        plan.hiccups.append((1 + rng.random() * 8, "p0", "d0"))
    return plan


def overtaken_handshakes(rng: Random) -> Plan:
    """Handshakes, Generates and cancels are seconds late, everything else is prompt: decode gives
    up and aborts before prefill has heard of the transfer."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.late_handshakes, plan.http_late, plan.late_s, plan.doubles = 0.95, 0.5, 12.0, 0.3
    plan.prefill_blocks = plan.decode_blocks = 20
    plan.num_slots = 4
    plan.writes = Faults(delay_s=0.3)
    for request in plan.requests:
        request.starts_at = 1.0 + rng.random()
        request.ghost = replace(request.ghost, kv_len=8, max_tokens=5)
        if rng.random() < 0.3:
            plan.client_leaves.append((1.5 + rng.random() * 4, request.idx))
    return plan


def slow_ticks(rng: Random) -> Plan:
    """Ranks vote and act up to a second apart, so messages come between the two; prompts are sent
    in chunks, and decode aborts in the middle."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.jitter_s = 1.0
    plan.writes = Faults(delay_s=0.05)
    plan.batch_size, plan.max_prefill_tokens, plan.is_chunked = 2, 4, True
    for request in plan.requests:
        request.tries_left = 1
        request.ghost = replace(request.ghost, kv_len=16, max_tokens=3)
    for _ in range(3):
        plan.hiccups.append((2 + rng.random() * 15, "p0", "d0"))
    return plan


def failing_links(rng: Random) -> Plan:
    """Several links per transfer, some of which fail, with retries on the same pair."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.prefill_tp, plan.decode_tp = rng.choice([(2, 1), (4, 1), (4, 2), (2, 2), (1, 2)])
    plan.num_kv_heads = 4
    plan.writes = Faults(delay_s=0.3, late=0.3, late_s=3.0, fails=0.15)
    plan.late, plan.late_s = 0.3, 3.0
    plan.jitter_s = rng.choice([0.0, 0.2])
    for request in plan.requests:
        request.tries_left = 3
    return plan


def restarts(rng: Random) -> Plan:
    """Prefill and decode restart at the same address while bytes are on their way."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.writes = Faults(delay_s=0.3, late=0.5, late_s=10.0)
    plan.late, plan.late_s = 0.3, 3.0
    for request in plan.requests:
        request.tries_left = 2
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(["p0", "p0", "d0"])
        plan.crashes.append((1 + rng.random() * 8, name, rng.uniform(0.0, 0.5), None))
    return plan


def short_of_blocks(rng: Random) -> Plan:
    """More requests than there are blocks for, all at once: they wait, pass each other and are
    retracted. In half of them nothing else goes wrong, so all must succeed."""
    plan = _deployment(rng)
    plan.num_prefills = plan.num_decodes = plan.num_routers = 1
    plan.is_calm = rng.random() < 0.5
    plan.jitter_s = min(plan.jitter_s, 0.01)  # one after the other, they must all be done in time
    plan.prefill_blocks, plan.num_slots = rng.choice([4, 5, 9]), rng.choice([2, 6, 6])
    plan.decode_blocks = rng.choice([6, 7, 9, 11])
    plan.num_host_blocks = rng.choice([0, 2, 4, 6, 11])
    plan.batch_size = rng.choice([3, 8, 8])
    plan.max_prefill_tokens, plan.is_chunked = plan.batch_size + rng.choice([1, 8]), True
    plan.num_reserved_decode_tokens = rng.choice([0, 0, 4])
    plan.writes = Faults(delay_s=rng.choice([0.02, 0.3]))
    plan.requests.clear()
    for idx in range(rng.randrange(4, 10)):
        ghost = Ghost(
            request=idx,
            attempt=0,
            kv_len=rng.choice([rng.randrange(1, 8), rng.randrange(1, 8), rng.randrange(8, 17)]),
            max_tokens=rng.randrange(2, 17),
            finishes=rng.random() < 0.1,
            num_shared=rng.choice([0, 5]) if plan.has_prefix_cache else 0,
        )
        starts_at = 1.0 + rng.random() * rng.choice([0.05, 2.0])
        request = ClientRequest(idx, 100 + idx, DEADLINE_S, ghost, tries_left=0)
        request.starts_at = starts_at
        plan.requests.append(request)
        if not plan.is_calm and rng.random() < 0.5:
            plan.client_leaves.append((1.0 + rng.random() * 4, idx))
    if not plan.is_calm and rng.random() < 0.5:
        plan.crashes.append((2.0 + rng.random(), "p0", 0.3, None))
    return plan


def peer_fences(rng: Random) -> Plan:
    """A fence cuts off a whole prefill instance, and with it other transfers."""
    plan = random_plan(rng)
    plan.is_calm = False
    plan.prefill_blocks = plan.decode_blocks = 20
    plan.num_slots = 4
    plan.writes = Faults(
        delay_s=0.3, late=0.5, late_s=10.0, fails=0.1, is_lost=0.2, has_peer_fence=True, fence_s=1.0
    )
    return plan


SCHEDULES: Mapping[str, Callable[[Random], Plan]] = {
    "any fault": random_plan,
    "lost once": lost_once,
    "early engine": early_engine,
    "two routers": two_routers,
    "room used again": room_again,
    "late messages": late_messages,
    "overtaken handshakes": overtaken_handshakes,
    "slow ticks": slow_ticks,
    "failing links": failing_links,
    "restarts": restarts,
    "peer fences": peer_fences,
    "short of blocks": short_of_blocks,
}
