"""The hand-off of one rank: its transfer engine, its manager, and what finds the other side."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferkit.config.build import build
from inferkit.config.schema import DisaggMode, InferenceConfig
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.core.protocols import Clock, TransferEngine
from inferkit.core.transfer_messages import InstanceLayout, Register
from inferkit.engine.execution_engine import ExecutionEngine
from inferkit.kv_cache.host_store import HostStore, can_run_short
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_transfer.decode_manager import DecodeTransferManager
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.layout import instance_layout, layer_layouts
from inferkit.kv_transfer.manager import KVTransferManager
from inferkit.kv_transfer.prefill_manager import PrefillTransferManager
from inferkit.kv_transfer.rank_memory import RankMemory, model_heads, register_memory
from inferkit.kv_transfer.registration import RankRegistration
from inferkit.kv_transfer.scout import Scout
from inferkit.kv_transfer.timers import TransferTimers
from inferkit.loader.source import ModelSource
from inferkit.parallel.comm_manager import CommManager
from inferkit.runtime.secret import read_secret

PREFILL_CELLS_PER_THREAD = 4
"""Slots that a prefill rank can write at the same time."""


@dataclass(frozen=True, kw_only=True)
class HandOffSide:
    """What a rank is told of its instance. Of a node that does not lead only `host` counts, the
    others come from rank 0."""

    peer: Peer = Peer("", 0)
    host: str = LOOPBACK
    """Address of this node under which other instances reach it."""
    bootstrap_url: str = ""
    """Of a prefill instance: where its ranks register."""


class HandOff:
    """Built before the KV cache, whose memory comes from the transfer engine; started last.

    Args:
        source: the model's files; None = random weights.
    """

    def __init__(
        self,
        config: InferenceConfig,
        side: HandOffSide,
        *,
        comm: CommManager,
        place: RankPlace,
        source: ModelSource | None,
        clock: Clock,
    ) -> None:
        self.config = config
        first: HandOffSide = comm.world.all_gather_objects(side)[0]
        self.side = replace(first, host=side.host)
        self.comm = comm
        self.source = source
        self.clock = clock
        self.me = self.side.peer
        self.secret = read_secret(config.disagg)
        self.is_decode = config.disagg.mode is DisaggMode.decode
        self.engine: TransferEngine = build(
            config.disagg.transfer,
            allowed_targets=config.allowed_targets,
            key="disagg.transfer",
            epoch=self.me.epoch,
            rank=comm.rank,
            host=side.host,
            device_id=place.local_rank,
            receives=self.is_decode,
            write_timeout_s=config.disagg.write_timeout_s,
        )
        self.registration: RankRegistration | None = None
        self.scout: Scout | None = None
        self._manager: KVTransferManager | None = None
        self._layout: InstanceLayout | None = None

    @property
    def allocate(self) -> Callable[[int], torch.Tensor]:
        """Memory that peers can write into."""
        return self.engine.allocate

    @property
    def manager(self) -> Any:
        """`PrefillTransferManager` or `DecodeTransferManager`."""
        assert self._manager is not None, "attach() comes first"
        return self._manager

    def attach(self, engine: ExecutionEngine, kv_cache: KVCacheManager) -> None:
        """The KV cache is allocated: let the transfer engine reach it."""
        worker = engine.worker
        assert worker.cache_buffer is not None, "the cache was not allocated by this engine"
        disagg = self.config.disagg
        slots = self.config.batch_size_per_dp_rank
        memory = register_memory(
            self.engine,
            specs=engine.cache_specs,
            caches=worker.kv_caches(),
            buffer=worker.cache_buffer,
            num_blocks=kv_cache.num_blocks,
            num_cells=slots
            if self.is_decode
            else PREFILL_CELLS_PER_THREAD * disagg.transfer.num_threads,
        )
        self._layout = self._instance_layout(memory)
        if self.is_decode:
            self._manager = self._decode_manager(memory, self._layout)
        else:
            self._manager = PrefillTransferManager(
                attn_tp_size=self.comm.layout.attn_tp_size,
                memory=memory,
                verify_digest=disagg.verify_digest,
                **self._common(),
            )

    def scheduler_parts(self, engine: ExecutionEngine, kv_cache: KVCacheManager) -> dict[str, Any]:
        """What the scheduler of the role is given beside what every scheduler is."""
        if not self.is_decode:
            return {"transfer": self.manager}
        return {"transfer": self.manager, "host_store": self._host_store(engine, kv_cache)}

    def start(self) -> None:
        """Comes when the rank can serve: from now on other instances find it."""
        disagg = self.config.disagg
        self.manager.start()
        if self.scout is not None:
            self.scout.start()
            return
        assert self._layout is not None, "attach() comes first"
        register = Register(
            instance_id=self.me.instance_id,
            epoch=self.me.epoch,
            peer_epoch=self.me.epoch,
            rank=self.comm.rank,
            rank_ip=self.side.host,
            rank_port=self.manager.port,
            layout=self._layout,
            max_prefill_tokens=self.config.scheduler.max_prefill_tokens,
        )
        self.registration = RankRegistration(
            url=self.side.bootstrap_url,
            register=register,
            interval_s=disagg.register_interval_s,
            secret=self.secret,
        )
        self.registration.start()

    def close(self) -> None:
        for part in (self.registration, self.scout, self._manager):
            if part is not None:
                part.close()

    def _host_store(self, engine: ExecutionEngine, kv_cache: KVCacheManager) -> HostStore:
        caches: dict[str, list[torch.Tensor]] = {}
        for spec, tensors in zip(engine.cache_specs, engine.worker.kv_caches(), strict=True):
            caches.setdefault(spec.manager_key, []).extend(tensors)
        return HostStore(
            caches=caches,
            num_bytes=self.config.kv_cache.host_bytes,
            is_needed=can_run_short(kv_cache),
            is_pinned=engine.worker.platform.device.type != "cpu",
        )

    def _decode_manager(self, memory: RankMemory, layout: InstanceLayout) -> DecodeTransferManager:
        manager = DecodeTransferManager(
            layout=layout,
            memory=memory,
            watch=lambda url, peer: scout.watch(url, peer),
            **self._common(),
        )
        scout = self.scout = Scout(
            on_route=manager.learn,
            on_lost=manager.lose,
            on_found=manager.find,
            interval_s=self.config.disagg.heartbeat_interval_s,
            misses=self.config.disagg.heartbeat_misses,
            secret=self.secret,
        )
        return manager

    def _common(self) -> dict[str, Any]:
        disagg = self.config.disagg
        return {
            "me": self.me,
            "rank": self.comm.rank,
            "engine": self.engine,
            "timers": TransferTimers(
                lease_s=disagg.lease_s,
                transfer_timeout_s=disagg.transfer_timeout_s,
                handshake_timeout_s=disagg.handshake_timeout_s,
                fence_timeout_s=disagg.fence_timeout_s,
                stash_s=disagg.stash_s,
            ),
            "host": self.side.host,
            "all_reduce_min": self._all_reduce_min,
            "secret": self.secret,
            "clock": self.clock,
        }

    def _all_reduce_min(self, votes: list[int]) -> list[int]:
        if self.comm.layout.attn_tp_size == 1:
            return votes  # ranks that share prompts by context hold requests of their own
        group = self.comm.group("tp_cpu_group")
        minimum: list[int] = group.all_reduce(torch.tensor(votes), "min").tolist()
        return minimum

    def _instance_layout(self, memory: RankMemory) -> InstanceLayout:
        parallel = self.comm.layout
        return instance_layout(
            model=self.config.model.name,
            model_fingerprint=self._fingerprint(),
            transfer_engine=engine_name(self.engine),
            parallel=parallel,
            layers=layer_layouts(
                memory.specs, model_heads(memory.specs), tp_size=parallel.attn_tp_size
            ),
            verify_digest=self.config.disagg.verify_digest,
        )

    def _fingerprint(self) -> str:
        """Of the weights, wherever their files lie."""
        model = self.config.model
        if self.source is not None:
            facts = self.source.identity(with_weights=model.with_ckpt)
            del facts["path"]
        else:
            facts = {"arch": model.arch}
        if not model.with_ckpt:
            facts["seed"] = self.config.data.seed or 0
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def engine_name(engine: TransferEngine) -> str:
    """What both sides must have in common: the class's own name, else that of the class."""
    name = getattr(engine, "name", None)
    return name if isinstance(name, str) else type(engine).__qualname__
