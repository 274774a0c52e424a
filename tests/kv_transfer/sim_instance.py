"""An instance of a simulated deployment, which ticks its ranks in lock step as a worker loop does:
events from the leader, votes, MIN over all ranks, decisions, one scheduling step; each rank at its
own time within the tick.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from inferkit.core.messages import Output
from inferkit.core.request import FinishReason
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.online.bootstrap_table import BootstrapTable
from inferkit.online.facts import InstanceFacts, Side
from inferkit.online.router.routed_request import Fault, LegFailure
from tests.kv_transfer.sim_bootstrap import make_table
from tests.kv_transfer.sim_nodes import Node
from tests.kv_transfer.sim_requests import Cancel, Generate, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.world import World

Leg = Callable[[Output | LegFailure], None]
WELL = {None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}


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
        self.legs: dict[TransferKey, Leg] = {}
        """Open HTTP connections, to whoever waits for the answer."""
        self.streamed: set[TransferKey] = set()
        self.url = f"http://{name}:80"
        self.bootstrap_url = f"http://{name}:18800"
        self.bootstrap: BootstrapTable | None = None
        """Of a prefill instance that is up."""

    @property
    def is_decode(self) -> bool:
        return self.num_slots > 0

    @property
    def is_up(self) -> bool:
        return bool(self.nodes) and all(node.is_up for node in self.nodes)

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.epoch)

    @property
    def facts(self) -> InstanceFacts:
        """What it says of itself."""
        return InstanceFacts(
            url=self.url,
            side=Side.DECODE if self.is_decode else Side.PREFILL,
            instance_id=self.name,
            epoch=self.epoch,
            bootstrap_url="" if self.is_decode else self.bootstrap_url,
        )

    def start(self) -> None:
        self.epoch = self.world.rng.getrandbits(64)
        self.nodes = [self.node_class(self.world, self, rank) for rank in range(self.num_ranks)]
        self.inbox.clear()
        self.streamed.clear()
        self.restart_bootstrap()
        self._tick_later(self.epoch)

    def restart_bootstrap(self) -> None:
        """It forgets all ranks."""
        self.bootstrap = None if self.is_decode else make_table(self.world, self)

    def crash(self, rank: int | None = None) -> None:
        """One rank dies, or all; an instance without one of its ranks ticks no more."""
        for node in self.nodes:
            if node.is_up and rank in (None, node.rank):
                node.is_up = False
                self.world.engine.writer_dies(node)
                self.world.engine.target_dies((self.name, node.rank))
        if rank is None:
            legs, self.legs = self.legs, {}
            for leg in legs.values():
                leg(LegFailure(Fault.BROKEN, "it has broken off"))

    # -- HTTP ----------------------------------------------------------------------------------

    def post(self, event: Generate, peer: Peer, leg: Leg) -> None:
        """A Generate for a life of this instance arrives; `leg` takes outputs, or the failure."""
        if not self.is_up:
            leg(LegFailure(Fault.BROKEN, "nobody listens"))
        elif peer != self.peer:
            leg(LegFailure(Fault.AWAY, "this is another life"))
        elif event.key in self.legs:
            leg(LegFailure(Fault.CONFLICT, "the attempt runs already"))
        else:
            self.legs[event.key] = leg
            self.inbox.append(event)

    def close(self, key: TransferKey) -> None:
        """The client of a leg has gone."""
        if self.legs.pop(key, None) is not None:
            self.inbox.append(Cancel(key))

    def tell(self, key: TransferKey, output: Output) -> None:
        """What the first rank says of a request."""
        reason = output.finish_reason
        if self.is_decode and key in self.streamed and reason not in WELL:
            raise Violation(f"{key} streams already and is ended with {reason}")
        if output.token_ids:
            self.streamed.add(key)
        leg = self.legs.get(key) if reason is None else self.legs.pop(key, None)
        if leg is not None:
            leg(output)

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
