"""One rank of a simulated deployment in one life.

A node owns the real record tables of a rank and does what a manager and a scheduler would do: it
carries out actions, takes and frees blocks, and moves requests on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferkit.core.errors import RequestError
from inferkit.core.transfer_messages import decode_transfer
from inferkit.kv_transfer.actions import Action, Code, End, Release, Send
from inferkit.kv_transfer.identity import Peer, TransferKey
from tests.kv_transfer.sim_requests import Cancel, Generate, Ghost, Pool

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World


class Node:
    """One rank in one life."""

    def __init__(self, world: "World", instance: "Instance", rank: int) -> None:
        self.world = world
        self.instance = instance
        self.rank = rank
        self.me = Peer(instance.name, instance.epoch)
        self.is_up = True
        self.pool = Pool(instance.num_blocks)
        self.ghosts: dict[TransferKey, Ghost] = {}
        self.common_log: list[tuple[Any, ...]] = []
        """What all ranks must do alike, in order."""
        self.records: Any = None
        world.loop.after(world.rng.random() * 0.2, self._timers)

    def receive(self, frame: bytes) -> None:
        self.carry_out(self.records.on_message(decode_transfer(frame)))

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, End):
                self.common_log.append((action.key, action.code))
                if self.rank == 0:
                    self.instance.answer(action.key, action.code)
            elif isinstance(action, Release):
                self.common_log.append((action.key, action.blocks, action.host_area))
                if action.blocks:
                    self.pool.give_back(action.key)
                self.on_release(action)
            else:
                self.on_action(action)

    def _send(self, action: Send) -> None:
        self.world.deliver(action.peer.instance_id, action.rank, action.message)

    def _timers(self) -> None:
        if self.is_up:
            self.carry_out(self.records.tick())
            self.world.loop.after(self.world.timer_interval(), self._timers)

    def apply(self, event: Generate | Cancel) -> None:
        if isinstance(event, Cancel):
            self.carry_out(self.records.cancel(event.key))
        else:
            self.ghosts[event.key] = event.ghost
            try:
                self.on_generate(event)
            except RequestError:
                if self.rank == 0:
                    self.instance.answer(event.key, Code.CONFLICT)

    def on_generate(self, event: Generate) -> None: ...
    def on_action(self, action: Action) -> None: ...
    def on_release(self, action: Release) -> None: ...
    def schedule(self, draw: float) -> None: ...
