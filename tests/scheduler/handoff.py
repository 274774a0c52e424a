"""Two schedulers joined without sockets: the real record tables, whose messages are delivered and
whose writes are carried out when `Link.pump` is called."""

from collections import deque

import numpy as np
import torch

from inferkit.core.protocols import WriteState
from inferkit.core.request import Handoff, Pair
from inferkit.core.transfer_messages import TargetMemory, decode_transfer, encode_transfer
from inferkit.kv_cache.host_store import HostStore
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_transfer.actions import (
    CancelWrites,
    CloseTransfer,
    End,
    Fence,
    Finished,
    Landed,
    OpenTransfer,
    PostBlocks,
    PostSlot,
    Ready,
    Release,
    Retracted,
    Send,
)
from inferkit.kv_transfer.decode_records import DecodeRecords
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.metadata_slot import SLOT_BYTES, MetadataSlots
from inferkit.kv_transfer.prefill_records import PrefillRecords
from inferkit.kv_transfer.rank_mapping import LinkTarget
from inferkit.kv_transfer.timers import TransferTimers
from inferkit.kv_transfer.transfer_plan import block_range
from inferkit.scheduler.decode_disagg import DecodeDisaggScheduler
from inferkit.scheduler.prefill_disagg import PrefillDisaggScheduler
from tests.fakes import MemoryEngine, make_request, make_spec

PREFILL, DECODE = Peer("p", 11), Peer("d", 22)
PAIR = Pair(
    prefill_id="p",
    prefill_epoch=11,
    decode_id="d",
    decode_epoch=22,
    bootstrap_url="http://127.0.0.1:18800",
)
EOS = 2
FOR_SCHEDULER = (Ready, End, Release, Landed, Finished, Retracted)


class StepClock:
    """Stands still unless it is moved."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Side:
    """A transfer of one rank: carries actions out, returns those that concern the scheduler."""

    def __init__(self, link):
        self.link = link
        self.records = None
        self.calls = []

    def _do(self, actions):
        for action in actions or ():
            if isinstance(action, Send):
                self.link.frames.append((action.peer, encode_transfer(action.message)))
            elif not isinstance(action, FOR_SCHEDULER):
                self.on_action(action)
        return [action for action in actions or () if isinstance(action, FOR_SCHEDULER)]

    def tick(self):
        return self._do(self.records.decide(self.records.votes()))

    def timers(self):
        assert self._do(self.records.tick()) == []

    def cancel(self, key):
        return self._do(self.records.cancel(key))


class PrefillSide(Side):
    def __init__(self, link, clock, timers):
        super().__init__(link)
        self.records = PrefillRecords(me=PREFILL, rank=0, clock=clock, timers=timers)
        self.block_ids = {}

    def accept(self, key, pair, *, remaining_ms):
        return self._do(self.records.accept(key, pair, remaining_ms=remaining_ms))

    def refuse(self, key, decode, reason):
        return self._do(self.records.refuse(key, decode, reason))

    def begin(self, key):
        self.calls.append(("begin", key))
        self.records.begin(key)

    def send_chunk(self, key, end_token, block_ids):
        self.calls.append(("send_chunk", key, end_token))
        self.block_ids[key, end_token] = block_ids
        return self._do(self.records.send_chunk(key, end_token))

    def complete(self, key, first_token, block_ids):
        self.calls.append(("complete", key))
        self.block_ids[key, first_token.kv_len] = block_ids
        return self._do(self.records.complete(key, first_token))

    def finish(self, key, first_token):
        self.calls.append(("finish", key))
        return self._do(self.records.finish(key, first_token))

    def on_action(self, action):
        if isinstance(action, PostBlocks | PostSlot):
            self.link.writes.append(action)
        else:
            assert isinstance(action, CancelWrites)


class DecodeSide(Side):
    def __init__(self, link, clock, timers, num_slots):
        super().__init__(link)
        self.slot_memory = bytearray(SLOT_BYTES * num_slots)
        self.slots = MetadataSlots(memory=memoryview(self.slot_memory), num_slots=num_slots)
        self.has_route = True
        self.is_copying = False
        """Copies to the host store are complete only when `finish_copies` is called."""
        self.copies = []
        self.fences = []
        self.records = DecodeRecords(
            me=DECODE,
            rank=0,
            reply_address="tcp://d",
            memory=TargetMemory(engine={}),
            slots=self.slots,
            routes=lambda peer, room: [LinkTarget(0, 1)] if self.has_route else None,
            clock=clock,
            timers=timers,
        )

    @property
    def num_free_slots(self):
        return self.slots.num_free

    def accept(self, key, pair, *, bootstrap_url, kv_len, seed, remaining_ms):
        assert bootstrap_url == PAIR.bootstrap_url
        return self._do(
            self.records.accept(key, pair, kv_len=kv_len, seed=seed, remaining_ms=remaining_ms)
        )

    def admissible(self):
        return self.records.admissible()

    def admit(self, key, block_ids):
        self.calls.append(("admit", key))
        return self._do(self.records.admit(key, block_ids))

    def complete(self, key):
        return self._do(self.records.complete(key))

    def retract(self, key):
        self.calls.append(("retract", key))
        self.records.retract(key)
        return []

    def on_copied(self, key):
        if self.is_copying:
            self.copies.append(key)
        else:
            self.records.on_copied(key)

    def finish_copies(self):
        copies, self.copies = self.copies, []
        for key in copies:
            self.records.on_copied(key)

    def resume(self, key):
        self.calls.append(("resume", key))
        return self._do(self.records.resume(key))

    def on_action(self, action):
        if isinstance(action, Fence):
            self.fences.append(action)
        else:
            assert isinstance(action, OpenTransfer | CloseTransfer)


class Link:
    """A prefill and a decode scheduler, and what moves between them."""

    def __init__(
        self,
        *,
        windows=(None,),
        prefill_blocks=100,
        decode_blocks=100,
        host_blocks=100,
        num_slots=8,
        batch_size=8,
        max_model_len=64,
        prefix_cache=False,
        eos_after=None,
        reserved=0,
        max_prefill_tokens=2048,
        chunked=True,
    ):
        self.clock = StepClock()
        self.frames = deque()
        self.writes = deque()
        timers = TransferTimers()
        self.prefill_side = PrefillSide(self, self.clock, timers)
        self.decode_side = DecodeSide(self, self.clock, timers, num_slots)
        self.prefill_cache = make_cache(
            windows, prefill_blocks, batch_size, max_model_len, prefix_cache
        )
        self.decode_cache = make_cache(windows, decode_blocks, batch_size, max_model_len, False)
        common = dict(
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            clock=self.clock,
            batch_size=batch_size,
        )
        self.prefill = PrefillDisaggScheduler(
            transfer=self.prefill_side,
            kv_cache=self.prefill_cache,
            max_prefill_tokens=max_prefill_tokens,
            enable_chunked_prefill=chunked,
            **common,
        )
        self.prefill_engine = MemoryEngine(self.prefill_cache, eos_after)
        self.decode_engine = MemoryEngine(self.decode_cache, eos_after)
        self.host_store = make_store(self.decode_engine, host_blocks)
        self.decode = DecodeDisaggScheduler(
            transfer=self.decode_side,
            host_store=self.host_store,
            num_reserved_decode_tokens=reserved,
            kv_cache=self.decode_cache,
            **common,
        )
        self.requests = {}
        self.tokens = {"p": {}, "d": {}}
        """What each side told, in order."""

    # -- requests ------------------------------------------------------------------------------

    def make(self, request_id, prompt_len, max_tokens=4, *, room=None, pair=PAIR, **sampling):
        """The two halves of a request."""
        halves = []
        for _ in range(2):
            request = make_request(request_id, prompt_len, max_tokens)
            room = room or 100 + request_id
            request.handoff = Handoff(room=room, attempt=7, pair=pair, remaining_ms=60_000)
            halves.append(request)
        self.requests[request_id] = tuple(halves)
        return tuple(halves)

    def add(self, request_id, prompt_len, max_tokens=4, **kwargs):
        halves = self.make(request_id, prompt_len, max_tokens, **kwargs)
        for scheduler, half in zip((self.prefill, self.decode), halves, strict=True):
            scheduler.add_request(half)
        return halves

    # -- ticks ---------------------------------------------------------------------------------

    def pump(self, num_writes=None):
        """Deliver every message, carry writes out; the queues may fill while that happens."""
        while self.frames or (self.writes and num_writes != 0):
            while self.frames:
                peer, frame = self.frames.popleft()
                side = self.prefill_side if peer == PREFILL else self.decode_side
                assert side._do(side.records.on_message(decode_transfer(frame))) == []
            if self.writes and num_writes != 0:
                num_writes = None if num_writes is None else num_writes - 1
                self._write(self.writes.popleft())

    def _write(self, post):
        if isinstance(post, PostSlot):
            start = post.handshake.slot * SLOT_BYTES + post.offset
            self.decode_side.slot_memory[start : start + len(post.data)] = post.data
        else:
            self._write_blocks(post)
        records = self.prefill_side.records
        side = self.prefill_side
        assert side._do(records.on_write_ended(post.write_id, WriteState.DONE)) == []

    def _write_blocks(self, post):
        sources = self.prefill_side.block_ids[post.key, post.end_token]
        for key, manager in self.prefill_cache.managers.items():
            size = manager.block_size
            first, end = block_range(post.first_token, post.end_token, size, is_last=post.is_last)
            source = self.prefill_engine.memory[key].reshape(-1, size)
            target = self.decode_engine.memory[key].reshape(-1, size)
            for idx in range(first, end):
                block = post.handshake.block_ids[key][idx]
                if block:
                    assert sources[key][idx], "decode wants a block that prefill holds no more"
                    target[block] = source[sources[key][idx]]

    def tick(self, side="pd"):
        """One tick of the loops, as OnlineLoop does it; everything adds up afterwards."""
        for name, scheduler, engine in (
            ("p", self.prefill, self.prefill_engine),
            ("d", self.decode, self.decode_engine),
        ):
            if name not in side:
                continue
            for request_id, tokens in scheduler.advance_queues().items():
                self._tell(name, scheduler, request_id, tokens)
            result = scheduler.run_step(engine) if scheduler.has_work else None
            for request_id, tokens in result.new_tokens.items() if result else ():
                self._tell(name, scheduler, request_id, tokens)
            for request_id in list(scheduler.finished_requests):
                scheduler.forget(request_id)
        self.check()

    def _tell(self, name, scheduler, request_id, tokens):
        assert scheduler.request(request_id).request_id == request_id
        self.tokens[name].setdefault(request_id, []).extend(tokens)

    def check(self):
        for scheduler in (self.prefill, self.decode):
            scheduler.kv_cache.check_integrity()
            check_queues(scheduler)
        self.host_store.check_integrity()

    def run(self, max_ticks=300, until=None, tick_s=0.0):
        """Until nothing is held anywhere, or until a condition holds."""
        for _ in range(max_ticks):
            self.tick()
            self.pump()
            if tick_s:
                self.clock.now_s += tick_s
                for side in (self.prefill_side, self.decode_side):
                    side.timers()
            if until is not None and until():
                return
            if until is None and not self.prefill.has_handoffs and not self.decode.has_handoffs:
                return
        raise AssertionError(f"not over after {max_ticks} ticks")

    def check_idle(self):
        """Nothing is held on either side."""
        self.tick()
        for scheduler in (self.prefill, self.decode):
            assert not scheduler.has_handoffs and not scheduler.has_work
            assert not scheduler._holders and not scheduler._requests
            assert scheduler.kv_cache.num_used_blocks == 0
            assert not scheduler.kv_cache._hashes and not scheduler.kv_cache._num_published
        assert self.host_store.num_requests == 0
        assert self.decode_side.num_free_slots == self.decode_side.slots.num_slots
        assert not self.decode._ages and not self.decode._hosted and not self.decode._copying


def check_queues(scheduler):
    """Every request is in exactly one queue."""
    queues = [
        {request.request_id for request in scheduler.waiting_queue},
        set(scheduler.running_requests),
        set(scheduler.finished_requests),
        *map(set, scheduler._own_queues().values()),
    ]
    assert sum(map(len, queues)) == len(scheduler._requests)
    assert set().union(*queues) == set(scheduler._requests)


def make_cache(windows, num_blocks, batch_size, max_model_len, prefix_cache):
    return KVCacheManager(
        specs=[make_spec(window=window, layer_idx=i) for i, window in enumerate(windows)],
        max_model_len=max_model_len,
        max_num_requests=batch_size,
        free_bytes=1 << 30,
        block_size=4,
        num_blocks=num_blocks,
        enable_prefix_cache=prefix_cache,
    )


def make_store(engine, num_blocks):
    """Over the memory of a MemoryEngine; so many blocks of each pool."""
    caches = {
        key: [torch.from_numpy(memory).view(-1, engine.kv_cache.managers[key].block_size, 1, 1)]
        for key, memory in engine.memory.items()
    }
    (num_pool,) = {len(tensors[0]) - 1 for tensors in caches.values()}
    pool_bytes = sum(tensors[0][1:].nbytes for tensors in caches.values())
    num_bytes = -(-pool_bytes * min(num_blocks, num_pool) // num_pool) if num_blocks else 1
    return HostStore(caches=caches, num_bytes=num_bytes)


def poison(engine):
    """Free memory holds nothing of use."""
    for key, manager in engine.kv_cache.managers.items():
        memory = engine.memory[key].reshape(-1, manager.block_size)
        for block in range(1, manager.pool.num_blocks):
            if manager.pool.is_free(block):
                memory[block] = np.full(manager.block_size, -7)
