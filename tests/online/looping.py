"""A rank's loop for tests: the real parts around a wire that is a list."""

from dataclasses import dataclass, field
from typing import Any

from inferkit.core.messages import (
    Abort,
    FromWorker,
    Generate,
    LoopState,
    Message,
    MessageReader,
    Output,
    Stop,
    encode,
)
from inferkit.core.sampling_params import SamplingParams
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.online.instance import Instance
from inferkit.online.loop import OnlineLoop
from inferkit.online.output_sender import NoOutbox, OutputSender
from inferkit.online.request_feed import RequestFeed
from inferkit.online.request_table import RequestTable
from inferkit.scheduler.scheduler import Scheduler
from tests.fakes import MemoryEngine, make_spec

VOCAB_SIZE = 60_000
MAX_MODEL_LEN = 64
INSTANCE = Instance(instance_id="serve-test", epoch=77)


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Wire:
    """In place of `WorkerLink`: frames that wait, and what was sent."""

    frames: list[bytes] = field(default_factory=list)
    sent: list[FromWorker] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """How long each call would have waited."""

    def receive(self, wait_ms: int) -> list[bytes]:
        self.waits.append(wait_ms)
        frames, self.frames = self.frames, []
        return frames

    def send(self, frames: list[bytes]) -> None:
        reader: MessageReader[FromWorker] = MessageReader(
            FromWorker, epoch=INSTANCE.epoch, peer_epoch=INSTANCE.epoch
        )
        for frame in frames:
            message = reader.read(frame)
            assert message is not None
            self.sent.append(message)

    def put(self, *messages: Message) -> None:
        self.frames += [encode(message) for message in messages]

    def outputs(self, key: tuple[int, int] | None = None) -> list[Output]:
        found = [message for message in self.sent if isinstance(message, Output)]
        return found if key is None else [output for output in found if output.key == key]

    def states(self) -> list[LoopState]:
        return [message for message in self.sent if isinstance(message, LoopState)]

    def tokens(self, key: tuple[int, int]) -> list[int]:
        """All output tokens of a request, which must come in order and without a gap."""
        tokens: list[int] = []
        for output in self.outputs(key):
            assert output.index == len(tokens)
            tokens += output.token_ids
        return tokens


def generate(room: int, prompt_len: int = 3, max_tokens: int = 4, **changes: Any) -> Generate:
    values: dict[str, Any] = {
        **INSTANCE.header,
        "room": room,
        "attempt": room + 1000,
        "token_ids": [100 + room * 7 + i for i in range(prompt_len)],
        "sampling": SamplingParams(temperature=0.0, max_tokens=max_tokens),
        "seed": 0,
    }
    return Generate(**{**values, **changes})


def abort(message: Generate) -> Abort:
    return Abort(**INSTANCE.header, room=message.room, attempt=message.attempt)


def stop() -> Stop:
    return Stop(**INSTANCE.header)


@dataclass
class Rank:
    """One rank: its loop and what it is made of."""

    loop: OnlineLoop
    wire: Wire
    clock: Now
    scheduler: Scheduler
    engine: MemoryEngine

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.loop.tick()
            self.scheduler.kv_cache.check_integrity()

    def run_dry(self, limit: int = 500) -> None:
        """Tick until there is nothing left to do."""
        for _ in range(limit):
            self.ticks(1)
            if not self.scheduler.has_work and not self.wire.frames:
                return
        raise AssertionError(f"still busy after {limit} ticks")

    def check_empty(self) -> None:
        """No request has left a trace."""
        assert self.scheduler.kv_cache.num_used_blocks == 0
        assert not self.scheduler.finished_requests and not self.scheduler._requests
        assert len(self.loop.requests) == 0 and not self.loop.feed._deadlines


def make_rank(
    *,
    is_leader: bool = True,
    group: Any = None,
    dp_group: Any = None,
    dp_rank: int = 0,
    num_blocks: int = 100,
    **scheduler_options: Any,
) -> Rank:
    kv_cache = KVCacheManager(
        specs=[make_spec()],
        max_model_len=MAX_MODEL_LEN,
        max_num_requests=8,
        free_bytes=1 << 30,
        block_size=4,
        num_blocks=num_blocks,
        enable_prefix_cache=True,
    )
    clock = Now()
    scheduler = Scheduler(
        kv_cache=kv_cache,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({2}),
        clock=clock,
        batch_size=8,
        **scheduler_options,
    )
    wire = Wire()
    engine = MemoryEngine(kv_cache)
    link: Any = wire if is_leader else None
    sender = OutputSender(instance=INSTANCE, dp_rank=dp_rank, link=link, clock=clock)
    feed = RequestFeed(
        instance=INSTANCE, link=link, group=group, clock=clock, on_refused=sender.refuse
    )
    loop = OnlineLoop(
        feed=feed,
        requests=RequestTable(vocab_size=VOCAB_SIZE),
        scheduler=scheduler,
        engine=engine,
        outbox=sender if is_leader else NoOutbox(),
        dp_group=dp_group,
    )
    return Rank(loop=loop, wire=wire, clock=clock, scheduler=scheduler, engine=engine)
