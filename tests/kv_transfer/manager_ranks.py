"""Instances of managers in this process: real sockets, real engines, small KV caches.

An `Instance` has one manager per rank and does what a scheduler would do alike on every rank: it
takes and frees blocks, computes, hands over. Its ranks tick at the same time, each on a thread of
its own, and meet in a MIN all-reduce.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.transfer_messages import InstanceLayout
from inferkit.kv_transfer.actions import (
    Action,
    Code,
    End,
    Finished,
    FirstToken,
    Landed,
    Ready,
    Release,
    Retracted,
)
from inferkit.kv_transfer.decode_manager import DecodeTransferManager
from inferkit.kv_transfer.engines.base import OpenTransfers
from inferkit.kv_transfer.engines.in_process import Fabric, InProcessEngine
from inferkit.kv_transfer.engines.shared_memory import SharedMemoryEngine
from inferkit.kv_transfer.engines.tcp import TcpEngine
from inferkit.kv_transfer.identity import Peer, PinnedPair, TransferKey, make_attempt
from inferkit.kv_transfer.layout import kv_head_layout, layer_layouts
from inferkit.kv_transfer.prefill_manager import PrefillTransferManager
from inferkit.kv_transfer.rank_mapping import PrefillServerInfo
from inferkit.kv_transfer.rank_memory import RankMemory, model_heads, register_memory
from inferkit.kv_transfer.timers import TransferTimers
from inferkit.platforms.paged_cache import PagedCache

DEADLINE_S = 60.0
"""For what ends at once on a machine that has time."""
TIMERS = TransferTimers(
    lease_s=6.0, transfer_timeout_s=40.0, handshake_timeout_s=40.0, fence_timeout_s=0.3
)
BLOCK_SIZE = 4
NUM_BLOCKS = 33
FULL = "full_attention"
WINDOW = "window"
GARBAGE = -7.0
"""What memory holds that must not travel."""
REMAINING_MS = 60_000

MakeEngine = Callable[..., Any]


def engines(name: str) -> MakeEngine:
    """A maker of engines that can reach each other."""
    if name == "in_process":
        return partial(InProcessEngine, fabric=Fabric())
    return {"shared_memory": SharedMemoryEngine, "tcp": TcpEngine}[name]


@dataclass(frozen=True)
class Layer:
    num_kv_heads: int = 4
    dims: tuple[int, ...] = (8, 8)
    window: int | None = None

    @property
    def manager_key(self) -> str:
        return FULL if self.window is None else WINDOW


GQA = (Layer(), Layer())
MIXED = (Layer(num_kv_heads=3, dims=(6, 6)), Layer(num_kv_heads=1, dims=(16, 4)))
"""Three heads, which two ranks pad, and latents, which every rank has."""


def specs_of(model: Sequence[Layer], tp_size: int) -> list[CacheSpec]:
    return [
        CacheSpec(
            layer_idx=idx,
            kind=CacheKind.FULL if layer.window is None else CacheKind.SLIDING_WINDOW,
            manager_key=layer.manager_key,
            num_heads=kv_head_layout(layer.num_kv_heads, tp_size).num_local_kv_heads,
            dims=layer.dims,
            dtype="float32",
            block_size=BLOCK_SIZE,
            window=layer.window,
            num_model_heads=layer.num_kv_heads,
        )
        for idx, layer in enumerate(model)
    ]


def content(room: int, layer_idx: int, tensor_idx: int, shape: Sequence[int]) -> torch.Tensor:
    """The KV of a request: [tokens, heads, dim] of the whole model."""
    generator = torch.Generator().manual_seed(1000 * room + 10 * layer_idx + tensor_idx)
    return torch.rand(tuple(shape), generator=generator)


@dataclass
class Job:
    """A request as an instance holds it."""

    key: TransferKey
    pair: PinnedPair
    kv_len: int
    blocks: dict[str, list[int]] = field(default_factory=dict)


class Group:
    """MIN over ranks that tick at the same time, each on the thread that is its model thread."""

    def __init__(self, num_ranks: int) -> None:
        self.executors = [ThreadPoolExecutor(1) for _ in range(num_ranks)]
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        self._vectors: dict[int, list[int]] = {}

    def all_reduce_min(self, rank: int, vector: list[int]) -> list[int]:
        self._vectors[rank] = vector
        self._barrier.wait()
        minimum = [min(column) for column in zip(*self._vectors.values(), strict=True)]
        self._barrier.wait()
        return minimum

    def run(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        futures = [
            executor.submit(call) for executor, call in zip(self.executors, calls, strict=True)
        ]
        return [future.result(DEADLINE_S) for future in futures]

    def close(self) -> None:
        for executor in self.executors:
            executor.shutdown()


class Instance:
    """One life of an instance."""

    manager_class: Any

    def __init__(
        self,
        name: str,
        epoch: int,
        make_engine: MakeEngine,
        *,
        model: Sequence[Layer] = GQA,
        tp: int = 1,
        num_cells: int = 4,
        timers: TransferTimers = TIMERS,
        secret: bytes = b"",
        verify_digest: bool = False,
    ) -> None:
        self.me = Peer(name, epoch)
        self.model = model
        self.tp = tp
        self.group = Group(tp)
        self.jobs: dict[TransferKey, Job] = {}
        self.ends: dict[TransferKey, End] = {}
        self.free = {key: list(range(1, NUM_BLOCKS)) for key in (FULL, WINDOW)}
        self.held: dict[TransferKey, dict[str, list[int]]] = {}
        self.reasons: dict[TransferKey, list[str]] = {}
        """Why a leg ended, as each rank sees it."""
        self.layout = InstanceLayout(
            model="m",
            model_fingerprint="f",
            transfer_engine="e",
            attn_tp_size=tp,
            layers=layer_layouts(specs_of(model, tp), model_heads(specs_of(model, tp)), tp_size=tp),
            verify_digest=verify_digest,
        )
        self.memories: list[RankMemory] = []
        self.managers: list[Any] = []
        for rank in range(tp):
            engine = make_engine(epoch=epoch, rank=rank, receives=self.receives)
            memory = lay_out(engine, specs_of(model, tp), num_cells)
            self.memories.append(memory)
            self.managers.append(
                self.make_manager(
                    me=self.me,
                    rank=rank,
                    engine=engine,
                    memory=memory,
                    timers=timers,
                    host="127.0.0.1",
                    secret=secret,
                    all_reduce_min=partial(self.group.all_reduce_min, rank),
                )
            )
        for manager in self.managers:
            manager.start()

    receives = False

    def make_manager(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        for manager in self.managers:
            manager.close()
        self.group.close()

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """A common event on every rank."""
        self.take([getattr(manager, name)(*args, **kwargs) for manager in self.managers])

    def tick(self) -> None:
        self.take(self.group.run([manager.tick for manager in self.managers]))
        self.schedule()

    def take(self, of_ranks: list[list[Action]]) -> None:
        kinds = [[(type(action), getattr(action, "key", None)) for action in actions]
                 for actions in of_ranks]  # fmt: skip
        assert all(kind == kinds[0] for kind in kinds), f"ranks are not in lock step: {kinds}"
        for action in (action for actions in of_ranks for action in actions):
            if isinstance(action, End):
                self.reasons.setdefault(action.key, []).append(action.reason)
        for action in of_ranks[0]:
            if isinstance(action, End):
                assert action.key not in self.ends, "a leg is answered twice"
                self.ends[action.key] = action
            elif isinstance(action, Release) and action.blocks:
                for key, ids in self.held.pop(action.key).items():
                    self.free[key] += [idx for idx in ids if idx]
            else:
                self.on_action(action)

    def on_action(self, action: Action) -> None: ...

    def schedule(self) -> None: ...

    def take_blocks(self, key: TransferKey, num_tokens: int) -> dict[str, list[int]]:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = {}
        for layer in self.model:
            if layer.manager_key not in blocks:
                pool = self.free[layer.manager_key]
                blocks[layer.manager_key] = [pool.pop() for _ in range(num_blocks)]
        self.held[key] = blocks
        return blocks

    def stats(self) -> dict[str, int]:
        return self.managers[0].stats()

    def is_quiet(self) -> bool:
        """Nothing is held any more."""
        return not self.held and all(manager.num_records == 0 for manager in self.managers)

    def check_empty(self) -> None:
        assert self.is_quiet()
        assert all(sorted(pool) == list(range(1, NUM_BLOCKS)) for pool in self.free.values())


class PrefillInstance(Instance):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ready: list[TransferKey] = []
        self.chunks: dict[TransferKey, list[int]] = {}
        """Ends of chunks that are computed one per tick; set by a test."""
        self.finishes: set[TransferKey] = set()
        self.is_stopped = False
        """Computes nothing."""
        self.first_token = FirstToken(token_id=77, kv_len=0)
        super().__init__(*args, **kwargs)

    def make_manager(self, **kwargs: Any) -> PrefillTransferManager:
        return PrefillTransferManager(
            attn_tp_size=self.tp, verify_digest=self.layout.verify_digest, **kwargs
        )

    def info(self) -> PrefillServerInfo:
        addresses = {rank: manager.address for rank, manager in enumerate(self.managers)}
        return PrefillServerInfo(peer=self.me, layout=self.layout, addresses=addresses)

    def generate(self, job: Job, chunks: Sequence[int] = ()) -> None:
        self.jobs[job.key] = job
        self.chunks[job.key] = [*chunks, job.kv_len]
        self.call("accept", job.key, job.pair, remaining_ms=REMAINING_MS)

    def on_action(self, action: Action) -> None:
        if isinstance(action, Ready):
            self.ready.append(action.key)

    def schedule(self) -> None:
        if self.is_stopped:
            return
        for key in [key for key in self.ready if key not in self.ends]:
            self.ready.remove(key)
            self.take_blocks(key, self.jobs[key].kv_len)
            self.call("begin", key)
        for key in list(self.held):
            if not self.managers[0].is_sending(key) or not self.chunks[key]:
                continue
            end, job = self.chunks[key].pop(0), self.jobs[key]
            self.compute(job, end)
            if self.chunks[key]:
                self.call("send_chunk", key, end, self.held[key])
            else:
                token = FirstToken(token_id=77, kv_len=job.kv_len, seed=key.room)
                if key in self.finishes:
                    self.call("finish", key, token)
                else:
                    self.call("complete", key, token, self.held[key])

    def compute(self, job: Job, end: int) -> None:
        """Write the KV of tokens [0, end) into this instance's blocks, on every rank."""
        for rank, memory in enumerate(self.memories):
            for layer, spec in zip(self.model, memory.specs, strict=True):
                heads = kv_head_layout(layer.num_kv_heads, self.tp).kv_heads(rank)
                for tensor_idx, cache in enumerate(memory.caches[spec.layer_idx]):
                    shape = (job.kv_len, layer.num_kv_heads, layer.dims[tensor_idx])
                    whole = content(job.key.room, spec.layer_idx, tensor_idx, shape)
                    for token in range(end):
                        block = self.held[job.key][spec.manager_key][token // BLOCK_SIZE]
                        for position, head in enumerate(heads):
                            value = GARBAGE if head is None else whole[token, head]
                            cache[block, token % BLOCK_SIZE, position] = value

    def check_empty(self) -> None:
        super().check_empty()
        assert not any(manager._sources or manager._digests for manager in self.managers)


class DecodeInstance(Instance):
    receives = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.landed: dict[TransferKey, Landed] = {}
        self.finished: dict[TransferKey, Finished] = {}
        self.retracted: list[TransferKey] = []
        super().__init__(*args, **kwargs)
        for memory in self.memories:
            for tensors in memory.caches.values():
                for cache in tensors:
                    cache[0] = GARBAGE  # nobody may write there

    def make_manager(self, **kwargs: Any) -> DecodeTransferManager:
        return DecodeTransferManager(layout=self.layout, **kwargs)

    def learn(self, prefill: PrefillInstance) -> None:
        for manager in self.managers:
            manager.learn(prefill.info())

    def generate(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.call(
            "accept",
            job.key,
            job.pair,
            bootstrap_url="http://p",
            kv_len=job.kv_len,
            seed=job.key.room,
            remaining_ms=REMAINING_MS,
        )

    def on_action(self, action: Action) -> None:
        if isinstance(action, Landed):
            self.landed[action.key] = action
            self.check_content(self.jobs[action.key])
        elif isinstance(action, Finished):
            self.finished[action.key] = action
        elif isinstance(action, Retracted):
            self.retracted.append(action.key)

    def schedule(self) -> None:
        for key in self.managers[0].admissible():
            job = self.jobs[key]
            if self.managers[0].num_free_slots:
                blocks = self.take_blocks(key, job.kv_len + 1)
                self.hide_windows(job, blocks)
                self.call("admit", key, blocks)

    def hide_windows(self, job: Job, blocks: dict[str, list[int]]) -> None:
        """Decode does not hold what lies before a window."""
        for layer in self.model:
            if layer.window is not None and layer.manager_key in blocks:
                first = max(0, job.kv_len - layer.window + 1) // BLOCK_SIZE
                ids = blocks[layer.manager_key]
                self.free[layer.manager_key] += [idx for idx in ids[:first] if idx]
                ids[:first] = [0] * first

    def check_content(self, job: Job) -> None:
        """Every byte that the request reads is there, on every rank."""
        for rank, memory in enumerate(self.memories):
            for layer, spec in zip(self.model, memory.specs, strict=True):
                heads = kv_head_layout(layer.num_kv_heads, self.tp).kv_heads(rank)
                for tensor_idx, cache in enumerate(memory.caches[spec.layer_idx]):
                    shape = (job.kv_len, layer.num_kv_heads, layer.dims[tensor_idx])
                    whole = content(job.key.room, spec.layer_idx, tensor_idx, shape)
                    for token in range(job.kv_len):
                        block = self.held[job.key][spec.manager_key][token // BLOCK_SIZE]
                        for position, head in enumerate(heads):
                            if block and head is not None:
                                seen = cache[block, token % BLOCK_SIZE, position]
                                assert torch.equal(seen, whole[token, head])
                    # Neither padded heads nor the null block were written.
                    for position, head in enumerate(heads):
                        if head is None:
                            assert not cache[1:, :, position].any()
                    assert (cache[0] == GARBAGE).all()

    def check_empty(self) -> None:
        super().check_empty()
        for manager in self.managers:
            assert manager.num_free_slots == manager.memory.num_cells
            assert manager.records.floor == manager.records._next_id
            assert not getattr(manager.engine, "open_transfers", OpenTransfers())._ids


def lay_out(engine: Any, specs: Sequence[CacheSpec], num_cells: int) -> RankMemory:
    """Caches of all layers in one buffer, as ModelWorker.init_kvcache does."""
    num_blocks = {spec.manager_key: NUM_BLOCKS for spec in specs}
    sizes = [NUM_BLOCKS * spec.bytes_per_block for spec in specs]
    buffer = engine.allocate(sum(sizes))
    platform = PagedCache(device=torch.device("cpu"))
    caches = [
        platform.allocate(spec, NUM_BLOCKS, part)
        for spec, part in zip(specs, buffer.split(sizes), strict=True)
    ]
    return register_memory(
        engine,
        specs=specs,
        caches=caches,
        buffer=buffer,
        num_blocks=num_blocks,
        num_cells=num_cells,
    )


class Site:
    """Makes instances whose engines reach each other, and closes them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.make_engine = engines("in_process")
        self.defaults: dict[str, Any] = {}

    def use(self, engine: str, **defaults: Any) -> "Site":
        self.make_engine = engines(engine)
        self.defaults = defaults
        return self

    @property
    def fabric(self) -> Fabric:
        """Of the in-process engines."""
        fabric: Fabric = self.make_engine.keywords["fabric"]
        return fabric

    def prefill(self, name: str = "p", epoch: int = 11, **kwargs: Any) -> PrefillInstance:
        instance = PrefillInstance(name, epoch, self.make_engine, **self.defaults | kwargs)
        self.stack.callback(instance.close)
        return instance

    def decode(
        self, *prefills: PrefillInstance, name: str = "d", epoch: int = 22, **kwargs: Any
    ) -> DecodeInstance:
        """It knows the routes to these prefill instances."""
        instance = DecodeInstance(name, epoch, self.make_engine, **self.defaults | kwargs)
        self.stack.callback(instance.close)
        for prefill in prefills:
            instance.learn(prefill)
        return instance

    def pair(
        self, tp: tuple[int, int] = (1, 1), **kwargs: Any
    ) -> tuple[PrefillInstance, DecodeInstance]:
        prefill = self.prefill(tp=tp[0], **kwargs)
        return prefill, self.decode(prefill, tp=tp[1], **kwargs)


_rooms = count(1)


def make_job(prefill: Instance, decode: Instance, kv_len: int = 10, room: int = 0) -> Job:
    key = TransferKey(room or next(_rooms), make_attempt(1, next(_rooms)))
    return Job(key, PinnedPair(prefill.me, decode.me), kv_len)


def pump(
    instances: Sequence[Instance], until: Callable[[], bool], deadline_s: float = DEADLINE_S
) -> None:
    """Tick the instances until something is so."""
    deadline = time.monotonic() + deadline_s
    while not until():
        assert time.monotonic() < deadline, f"it does not happen: {[i.stats() for i in instances]}"
        for instance in instances:
            instance.tick()
        time.sleep(0.001)


def hand_over(
    prefill: PrefillInstance,
    decode: DecodeInstance,
    jobs: Sequence[Job],
    chunks: Mapping[TransferKey, Sequence[int]] | None = None,
) -> None:
    """Requests from Generate to running on decode."""
    for job in jobs:
        decode.generate(job)
        prefill.generate(job, (chunks or {}).get(job.key, ()))
    pump([prefill, decode], lambda: all(job.key in decode.landed for job in jobs))
    pump([prefill, decode], prefill.is_quiet)
    for job in jobs:
        assert prefill.ends[job.key].code is Code.OK
        assert decode.landed[job.key].slot.first_token == 77
