"""The decode ranks that a prefill rank writes to: a link of the engine and a plan for each.

Belongs to the thread that posts writes; nothing here is locked.
"""

from collections.abc import Mapping
from typing import Any

from inferkit.core.protocols import Clock, TransferEngine
from inferkit.core.transfer_messages import Handshake, TargetMemory
from inferkit.kv_transfer.identity import Peer
from inferkit.kv_transfer.rank_memory import RankMemory
from inferkit.kv_transfer.transfer_plan import LinkPlan, TransferPlanError, plan_for

MAX_TP_SIZE = 4096
"""A plan looks at every rank of its peer."""


class DecodeTarget:
    """One decode rank in one life of its instance."""

    def __init__(self, memory: TargetMemory, plan: LinkPlan) -> None:
        self.memory = memory
        self.plan = plan
        self.link: Any = None
        """Of the engine; None before the first write."""
        self.num_in_flight = 0
        self.used_at = 0.0


class DecodeTargets:
    """Args:
    tp: (size, rank) of this rank among those that share a request.
    idle_s: a target that nothing was written to for so long is forgotten.
    """

    def __init__(
        self,
        *,
        engine: TransferEngine,
        memory: RankMemory,
        tp: tuple[int, int],
        clock: Clock,
        idle_s: float,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.tp = tp
        self.clock = clock
        self.idle_s = idle_s
        self._targets: dict[tuple[Peer, int], DecodeTarget] = {}
        self._lives: dict[str, Peer] = {}
        """Instance -> the life that was written to last."""

    def __len__(self) -> int:
        return len(self._targets)

    def of(self, handshake: Handshake) -> DecodeTarget:
        """The rank that sent a Handshake, with a link that can be written to.

        Raises:
            TransferPlanError: what it says of its memory does not fit this rank's, or has changed.
            TransferEngineError: its engine cannot be reached.
        """
        peer = Peer.sender_of(handshake)
        key = (peer, handshake.decode_rank)
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._make(handshake)
        elif target.memory != handshake.memory:
            raise TransferPlanError(
                f"decode rank {handshake.decode_rank} of {peer.instance_id} names other memory "
                "than before in the same life"
            )
        # An equal description gives the same link, or a new one where the old one broke.
        target.link = self.engine.connect(handshake.memory.engine)
        target.used_at = self.clock()
        self._lives[peer.instance_id] = peer
        return target

    def forget_old(self) -> None:
        """Disconnect from former lives and from ranks that have been idle for long."""
        now = self.clock()
        for (peer, rank), target in list(self._targets.items()):
            is_former = self._lives.get(peer.instance_id) != peer
            is_idle = now >= target.used_at + self.idle_s
            if not target.num_in_flight and (is_former or is_idle):
                self._forget(peer, rank, target)

    def _forget(self, peer: Peer, rank: int, target: DecodeTarget) -> None:
        del self._targets[peer, rank]
        if not any(peer == other for other, _ in self._targets):
            self._lives = {name: life for name, life in self._lives.items() if life != peer}
        if target.link is not None:
            self.engine.disconnect(target.link)

    def _make(self, handshake: Handshake) -> DecodeTarget:
        memory = handshake.memory
        if memory.attn_tp_size > MAX_TP_SIZE:
            raise TransferPlanError(
                f"decode rank {handshake.decode_rank} says attn_tp_size={memory.attn_tp_size}; "
                f"allowed is <= {MAX_TP_SIZE}"
            )
        plan = plan_for(
            handshake,
            specs=self.memory.specs,
            num_kv_heads=self.memory.num_kv_heads,
            sources=self.memory.tensors,
            tp_size=self.tp[0],
            tp_rank=self.tp[1],
        )
        return DecodeTarget(memory, plan)


def shared_layers(memory: RankMemory, target: TargetMemory) -> Mapping[int, int]:
    """Layer -> KV heads of the model, of the layers that both sides have."""
    theirs = {address.layer_idx for address in target.tensors}
    return {idx: total for idx, total in memory.num_kv_heads.items() if idx in theirs}
