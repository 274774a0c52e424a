from inferkit.scheduler.decode_room import DecodeRoom
from tests.fakes import MemoryEngine, make_request
from tests.scheduler.handoff import Link, make_cache, make_store


def make_room(*, windows=(None,), num_blocks=11, host_blocks=4):
    kv_cache = make_cache(windows, num_blocks, 8, 64, False)
    store = make_store(MemoryEngine(kv_cache), host_blocks)
    return DecodeRoom(
        kv_cache=kv_cache,
        host_store=store,
        max_kv_len=lambda request: request.num_prompt_tokens + request.sampling.max_tokens - 1,
    )


def take(room, request, num_tokens):
    assert room.kv_cache.allocate_slots(
        request.request_id, num_computed_tokens=0, num_new_tokens=num_tokens
    )


def test_blocks_are_for_others_only_while_the_eldest_can_come_to_its_end():
    """Pool of 10, store of 4: the eldest may come to hold 8 and holds 2."""
    room = make_room()
    eldest, other = make_request(0, 8, 25), make_request(1, 16, 8)
    take(room, eldest, 8)
    in_flight = [eldest]

    def may_take(num_tokens):
        return room.may_take(other, num_tokens, lambda: in_flight, ())

    assert may_take(16), "4 of 8 free blocks; the store takes them back"
    assert not may_take(17), "5 blocks fit into no store of 4"
    take(room, other, 16)
    in_flight.append(other)
    assert not may_take(17)
    assert room.may_take(eldest, 17, lambda: in_flight, ()), "the headroom is for it"
    assert room.may_retract(other, in_flight, ())


def test_a_victim_leaves_those_that_must_follow_it_room_in_the_store():
    """The eldest needs 4 blocks more than are free: both of 2 must go, and they can, but after the
    one of 3 neither could."""
    room = make_room(num_blocks=11, host_blocks=4)
    eldest = make_request(0, 12, 17)
    three, two, also_two = make_request(1, 12, 1), make_request(2, 8, 1), make_request(3, 8, 1)
    for request in (eldest, three, two, also_two):
        take(room, request, request.num_prompt_tokens)
    in_flight = [eldest, three, two, also_two]
    assert not room.may_retract(three, in_flight, ())
    assert room.may_retract(two, in_flight, ()) and room.may_retract(also_two, in_flight, ())


def test_the_whole_of_a_window_is_set_aside():
    """A window of 9 tokens touches at most 4 blocks; two requests fit into 10."""
    room = make_room(windows=(9,))
    requests = [make_request(idx, 4, 40) for idx in range(3)]
    for idx, request in enumerate(requests):
        fits = room.may_take(request, 5, lambda idx=idx: requests[:idx], ())
        assert fits == (idx < 2)
        take(room, request, 5)


def test_a_request_waits_for_blocks_that_drain_rather_than_start_and_starve():
    link = Link(decode_blocks=9)
    link.add(0, 8)
    link.tick("d")
    link.decode.abort(0)
    link.add(1, 8, 20)
    link.tick("d")
    assert list(link.decode.prealloc_queue) == [1]
    link.run()
    link.check_idle()
