from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.scheduler.headroom import Headroom, most_that_fits

sizes = st.lists(st.integers(1, 12), max_size=8)


@settings(deadline=None)
@given(sizes, st.integers(0, 40), st.none() | st.integers(0, 9))
def test_the_most_that_fits_is_that_of_all_choices(sizes, capacity, max_count):
    sums = [
        sum(chosen)
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
        if max_count is None or count <= max_count
    ]
    assert most_that_fits(sizes, capacity, max_count) == max(s for s in sums if s <= capacity)


def headroom(**kwargs):
    values = dict(
        num_free=0, num_host_free=4, largest_need=8, held_by_eldest=3, held_by_others=[2, 2]
    )
    return Headroom(**{**values, **kwargs})


def test_the_eldest_gets_what_is_free_and_what_the_store_takes():
    assert not headroom().is_enough, "3 + 4 < 8"
    assert headroom(num_free=1).is_enough
    assert headroom(num_free=5, num_host_free=0).is_enough
    assert not headroom(num_free=1, num_host_free=3).is_enough, "only one of the others fits"
    assert not headroom(num_free=1, held_by_others=[5]).is_enough, "it is too big to be copied"
    assert not headroom(num_free=1, max_retractions=1).is_enough
    assert headroom(num_free=3, max_retractions=1).is_enough


@settings(deadline=None)
@given(st.data())
def test_it_stays_true_whatever_ends_lands_is_retracted_or_resumed(data):
    """The reason why the eldest always comes to its end; checks happen only where blocks are
    taken by another than the eldest."""
    total, num_host = data.draw(st.integers(4, 24)), data.draw(st.integers(0, 12))
    need = data.draw(st.integers(1, total))
    host: dict[int, int] = {}
    names: list[int] = []

    def state(free, host_free, held_now):
        others = [held_now[name] for name in names[1:] if held_now[name]]
        return Headroom(
            num_free=free,
            num_host_free=host_free,
            largest_need=need,
            held_by_eldest=held_now[names[0]] if names else 0,
            held_by_others=others,
        )

    on_device: dict[int, int] = {}
    for name in range(30):
        free = total - sum(on_device.values())
        host_free = num_host - sum(host.values())
        choice = data.draw(st.sampled_from(["admit", "grow", "end", "retract", "resume"]))
        if choice == "admit":
            size = data.draw(st.integers(1, need))
            names.append(name)
            on_device[name] = size
            if free < size or not state(free - size, host_free, on_device).is_enough:
                names.remove(name)
                del on_device[name]
        elif choice == "grow" and names:
            who = data.draw(st.sampled_from(names))
            if free and 0 < on_device[who] < need:
                on_device[who] += 1
                may = who == names[0] or state(free - 1, host_free, on_device).is_enough
                on_device[who] -= not may
        elif choice == "end" and names:
            who = data.draw(st.sampled_from(names))
            names.remove(who)
            on_device.pop(who)
            host.pop(who, None)
        elif choice == "retract" and len(names) > 1:
            rest = [name for name in names[1:] if 0 < on_device[name] <= host_free]
            for who in reversed(rest):
                moved = {**on_device, who: 0}
                size = on_device[who]
                if state(free + size, host_free - size, moved).is_enough:
                    on_device, host[who] = moved, size
                    break
        elif choice == "resume" and host:
            who = next(name for name in names if name in host)
            if free >= host[who]:
                on_device[who] = host.pop(who)
        if names:
            now = state(total - sum(on_device.values()), num_host - sum(host.values()), on_device)
            assert now.is_enough
