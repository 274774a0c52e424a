"""How decode ranks find prefill ranks: the real table of a bootstrap server, and the real memory of
a scout. Only HTTP between them is simulated."""

from typing import TYPE_CHECKING

import msgspec

from inferkit.core.transfer_messages import Register
from inferkit.kv_transfer.heartbeat import Heartbeat
from inferkit.kv_transfer.route import read_health, read_route
from inferkit.kv_transfer.watched_routes import WatchedRoutes
from inferkit.online.bootstrap_table import BootstrapTable
from inferkit.online.errors import Unavailable

if TYPE_CHECKING:
    from tests.kv_transfer.sim_decode import DecodeNode
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.sim_prefill import PrefillNode
    from tests.kv_transfer.world import World

REGISTER_S = 1.0
HEARTBEAT_S = 1.0
NUM_MISSES = 2
PROBE_TIMEOUT_S = 0.5


def make_table(world: "World", instance: "Instance") -> BootstrapTable:
    """Empty: of an instance that has started, or of a server that has."""
    return BootstrapTable(
        instance_id=instance.name,
        epoch=instance.epoch,
        register_interval_s=REGISTER_S,
        clock=world.loop.clock,
    )


def register(node: "PrefillNode") -> None:
    """Of a prefill rank: again and again while it lives."""
    world, layout = node.world, node.world.layout(node.world.plan.prefill_tp)
    message = Register(
        instance_id=node.me.instance_id,
        epoch=node.me.epoch,
        peer_epoch=node.me.epoch,
        rank=node.rank,
        rank_ip="127.0.0.1",
        rank_port=1000 + node.rank,
        layout=layout,
    )

    def arrive() -> None:
        is_heard = not (world.is_silent and world.plan.is_http_silent)
        if node.is_up and is_heard and node.instance.bootstrap is not None:
            node.instance.bootstrap.register(message)

    def send() -> None:
        if node.is_up:
            world.loop.after(world.rng.random() * 0.1, arrive)
            if world.plan.registers_again:
                world.loop.after(REGISTER_S, send)

    world.loop.after(world.rng.random() * 0.3, send)


class Scout:
    """Of a decode rank."""

    def __init__(self, node: "DecodeNode") -> None:
        self.node = node
        self.world = node.world
        clock = self.world.loop.clock
        self.routes = WatchedRoutes(
            heartbeat=Heartbeat(interval_s=HEARTBEAT_S, num_misses=NUM_MISSES, clock=clock),
            on_route=node.learn,
            on_lost=node.lose,
            on_found=node.find,
            clock=clock,
        )
        self.world.loop.after(self.world.rng.random() * 0.2, self._look)

    def _look(self) -> None:
        if not self.node.is_up:
            return
        for url in self.routes.due():
            self.world.loop.after(self.world.rng.random() * 0.05, lambda url=url: self._ask(url))
        interval_s = self.world.rng.uniform(1.0, 5.0) if self.world.is_silent else 0.2
        self.world.loop.after(interval_s, self._look)

    def _ask(self, url: str) -> None:
        instance = self.world.by_bootstrap_url[url]
        if not self.node.is_up:
            return
        table = instance.bootstrap if instance.is_up else None
        if table is None or self.world.is_cut(instance, self.node.instance):
            self.world.loop.after(PROBE_TIMEOUT_S, lambda: self._miss(url))
            return
        if self.routes.known(url) is not None:
            health = read_health(msgspec.json.encode(table.health()))
            if not self.routes.answered(url, health):
                return
        try:
            route = table.route()
        except Unavailable as error:
            self.routes.lacks_ranks(url, str(error))
        else:
            self.routes.has_route(url, read_route(msgspec.json.encode(route)))

    def _miss(self, url: str) -> None:
        if self.node.is_up:
            self.routes.missed(url, "unreachable", "no answer")
