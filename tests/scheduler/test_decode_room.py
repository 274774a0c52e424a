from inferkit.scheduler.decode_room import DecodeRoom
from tests.fakes import MemoryEngine, make_request
from tests.scheduler.handoff import Link, make_cache, make_store


class Room(DecodeRoom):
    """With the requests that are in flight, the eldest first."""

    def __init__(self, *, windows=(None,), num_blocks=11, host_blocks=4):
        self.requests = []
        kv_cache = make_cache(windows, num_blocks, 8, 64, False)
        super().__init__(
            kv_cache=kv_cache,
            host_store=make_store(MemoryEngine(kv_cache), host_blocks),
            max_kv_len=lambda request: request.num_prompt_tokens + request.sampling.max_tokens - 1,
            in_flight=lambda: self.requests,
            copying=(),
        )

    def take(self, request, num_tokens):
        assert self.kv_cache.allocate_slots(
            request.request_id, num_computed_tokens=0, num_new_tokens=num_tokens
        )
        if request not in self.requests:
            self.requests.append(request)
        self.changed()


def test_blocks_are_for_others_only_while_the_eldest_can_come_to_its_end():
    """Pool of 10, store of 4: the eldest may come to hold 8 and holds 2."""
    room = Room()
    eldest, other = make_request(0, 8, 25), make_request(1, 16, 8)
    room.take(eldest, 8)

    assert room.may_take(other, 16), "4 of 8 free blocks; the store takes them back"
    assert not room.may_take(other, 17), "5 blocks fit into no store of 4"
    room.take(other, 16)
    assert not room.may_take(other, 17)
    assert room.may_take(eldest, 17), "the headroom is for it"
    assert room.may_retract(other)


def test_blocks_are_followed_while_rows_take_them():
    """Three requests ask in one step: pool of 10, no store; the eldest may come to hold 4."""
    room = Room(host_blocks=0)
    requests = [make_request(idx, 8, 9) for idx in range(3)]
    for request in requests:
        room.take(request, 8)
    for request in requests[1:]:
        assert room.may_take(request, 9)
        room.kv_cache.allocate_slots(request.request_id, num_computed_tokens=8, num_new_tokens=1)
        room.took(request)
    assert not room.may_take(requests[1], 13), "the last two free blocks are the eldest's"
    assert room.may_take(requests[0], 9)


def test_a_victim_leaves_those_that_must_follow_it_room_in_the_store():
    """The eldest needs 4 blocks more than are free: both of 2 must go, and they can, but after the
    one of 3 neither could."""
    room = Room(num_blocks=11, host_blocks=4)
    eldest = make_request(0, 12, 17)
    three, two, also_two = make_request(1, 12, 1), make_request(2, 8, 1), make_request(3, 8, 1)
    for request in (eldest, three, two, also_two):
        room.take(request, request.num_prompt_tokens)
    assert not room.may_retract(three)
    assert room.may_retract(two) and room.may_retract(also_two)


def test_the_whole_of_a_window_is_set_aside():
    """A window of 9 tokens touches at most 4 blocks; two requests fit into 10."""
    room = Room(windows=(9,))
    for idx in range(3):
        request = make_request(idx, 4, 40)
        assert room.may_take(request, 5) == (idx < 2)
        room.take(request, 5)


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
