"""Thousands of random schedules of the hand-off under a virtual clock, and what they are worth.

After every event: a write that can still land points into memory of the attempt it was posted for,
source blocks are held while they are read, and pools, slots and rooms add up on every rank; ranks
of a group stay in lock step; a request runs only on its own KV and first token. At the end:
silence releases everything, and each pair serves again. See world.py.
"""

from random import Random

import pytest

from tests.kv_transfer.mutations import MUTATIONS, Mutation, first_violation
from tests.kv_transfer.schedules import SCHEDULES
from tests.kv_transfer.world import World

NUM_DEFAULT = 46
NUM_FUZZ = 840
"""Schedules of each kind: 552 and 10 080 in all."""
MAX_SEEDS = 1500
QUICK_SEEDS = 15

NOT_NOTICED = {
    "timer: decode silent, deadline of prefill",
    "scheduler: a prompt begins only if all of it fits",
    "router: both legs are cancelled",
}
"""Rules that others cover for (README.md)."""


def run(kind: str, seeds: range) -> None:
    for seed in seeds:
        world = World(SCHEDULES[kind](Random(seed)), seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"schedule {kind!r}, seed {seed}, at {world.loop.now_s:.3f} s")
            raise


@pytest.mark.parametrize("kind", SCHEDULES)
def test_properties_hold_after_every_event(kind: str) -> None:
    run(kind, range(NUM_DEFAULT))


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_properties_hold_in_ten_thousand_schedules(kind: str) -> None:
    run(kind, range(NUM_DEFAULT, NUM_DEFAULT + NUM_FUZZ))


def ids(mutation: Mutation) -> str:
    return mutation.rule


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.is_quick], ids=ids)
def test_a_missing_rule_is_noticed_at_once(mutation: Mutation) -> None:
    assert first_violation(mutation, range(QUICK_SEEDS)) is not None


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=ids)
def test_every_missing_rule_is_noticed(mutation: Mutation) -> None:
    found = first_violation(mutation, range(MAX_SEEDS))
    assert (found is None) == (mutation.rule in NOT_NOTICED)
    if found is not None:
        print(f"| {mutation.rule} | {mutation.schedule} | {found[0] + 1} | {found[1]} |")
