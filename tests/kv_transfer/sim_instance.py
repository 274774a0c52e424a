"""An instance of a simulated deployment, which ticks its ranks in lock step as a worker loop does:
events from the leader, votes, MIN over all ranks, decisions, one scheduling step; each rank at its
own time within the tick.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferkit.kv_transfer.actions import Code
from inferkit.kv_transfer.identity import Peer, TransferKey
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import Cancel, Generate, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.world import World


class Instance:
    """An address where one instance lives, one life after the other."""

    def __init__(
        self,
        world: "World",
        name: str,
        node_class: type[Node],
        num_ranks: int,
        *,
        num_blocks: int,
        num_slots: int = 0,
    ) -> None:
        self.world = world
        self.name = name
        self.node_class = node_class
        self.num_ranks = num_ranks
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.epoch = 0
        self.nodes: list[Node] = []
        self.inbox: list[Generate | Cancel] = []
        self.legs: dict[TransferKey, Any] = {}
        """Open HTTP connections, to whoever waits for the answer."""
        self.streamed: set[TransferKey] = set()

    @property
    def is_decode(self) -> bool:
        return self.num_slots > 0

    @property
    def is_up(self) -> bool:
        return bool(self.nodes) and all(node.is_up for node in self.nodes)

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.epoch)

    def start(self) -> None:
        self.epoch = self.world.rng.getrandbits(64)
        self.nodes = [self.node_class(self.world, self, rank) for rank in range(self.num_ranks)]
        self.inbox.clear()
        self.streamed.clear()
        self._tick_later(self.epoch)

    def crash(self, rank: int | None = None) -> None:
        """One rank dies, or all; an instance without one of its ranks ticks no more."""
        for node in self.nodes:
            if node.is_up and rank in (None, node.rank):
                node.is_up = False
                self.world.engine.writer_dies(node)
                self.world.engine.target_dies((self.name, node.rank))
        if rank is None:
            legs, self.legs = self.legs, {}
            for key, leg in legs.items():
                leg(key, Code.UNAVAILABLE, [])

    # -- HTTP ----------------------------------------------------------------------------------

    def post(self, event: Generate, leg: Any) -> None:
        """A Generate arrives; `leg(key, code, token_ids)` takes the answer, piece by piece."""
        if not self.is_up:
            leg(event.key, Code.UNAVAILABLE, [])
            return
        self.legs[event.key] = leg
        self.inbox.append(event)

    def close(self, key: TransferKey) -> None:
        """The client of a leg has gone."""
        if self.legs.pop(key, None) is not None:
            self.inbox.append(Cancel(key))

    def answer(self, key: TransferKey, code: Code) -> None:
        if self.is_decode and key in self.streamed and code not in (Code.OK, Code.CANCELLED):
            raise Violation(f"{key} streams already and is ended with {code}")
        leg = self.legs.pop(key, None)
        if leg is not None:
            leg(key, code, [])

    def stream(self, key: TransferKey, token_ids: Sequence[int]) -> None:
        self.streamed.add(key)
        if key in self.legs:
            self.legs[key](key, None, token_ids)

    # -- the loop ------------------------------------------------------------------------------

    def _tick_later(self, epoch: int) -> None:
        self.world.loop.after(self.world.tick_interval(self), lambda: self._tick(epoch))

    def _tick(self, epoch: int) -> None:
        if self.epoch != epoch or not self.is_up:
            return
        events, self.inbox = self.inbox, []
        nodes, votes = self.nodes, {}
        jitter_s = self.world.plan.jitter_s

        def vote(node: Node) -> None:
            if not node.is_up:
                return
            for event in events:
                node.apply(event)
            votes[node.rank] = node.records.votes()
            if len(votes) == len(nodes):
                minimum = self.world.all_reduce_min([votes[n.rank] for n in nodes])
                for other in nodes:
                    self.world.loop.after(
                        self.world.rng.random() * jitter_s,
                        lambda other=other: decide(other, minimum),
                    )

        def decide(node: Node, minimum: list[int]) -> None:
            if not node.is_up:
                return
            node.tick(minimum)
            del votes[node.rank]
            if not votes:
                self._check_lock_step()
                self._tick_later(epoch)

        for node in nodes:
            self.world.loop.after(self.world.rng.random() * jitter_s, lambda node=node: vote(node))

    def _check_lock_step(self) -> None:
        if len(self.nodes) > 1 and any(node.common_log for node in self.nodes):
            first = self.nodes[0].lock_step()
            if any(node.lock_step() != first for node in self.nodes[1:]):
                raise Violation(f"ranks of {self.name} are not in lock step")
        for node in self.nodes:
            node.common_log.clear()
