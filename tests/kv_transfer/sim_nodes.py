"""One rank of a simulated deployment in one life: the real scheduler, KV cache and record table.

A node is what a manager, an engine and a worker loop are to them: it carries actions out, lets the
model compute, and tells results. Only what moves between ranks is simulated.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferkit.core.errors import RequestError
from inferkit.core.messages import Output
from inferkit.core.request import FinishReason, Handoff, Pair, Request
from inferkit.core.sampling_params import SamplingParams
from inferkit.core.transfer_messages import decode_transfer
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.kv_transfer.actions import (
    Action,
    End,
    Finished,
    Landed,
    Ready,
    Release,
    Retracted,
    Send,
)
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.scheduler.disagg import DisaggScheduler
from tests.kv_transfer.sim_model import MAX_MODEL_LEN, SimModel, make_kv_cache
from tests.kv_transfer.sim_requests import EOS, Cancel, Generate, Ghost, Violation

if TYPE_CHECKING:
    from tests.kv_transfer.sim_instance import Instance
    from tests.kv_transfer.world import World

FOR_SCHEDULER = (End, Release, Ready, Landed, Finished, Retracted)


class Node:
    """One rank in one life."""

    records: Any
    scheduler: DisaggScheduler

    def __init__(self, world: "World", instance: "Instance", rank: int, num_lanes: int) -> None:
        self.world = world
        self.instance = instance
        self.rank = rank
        self.me = Peer(instance.name, instance.epoch)
        self.is_up = True
        self.kv_cache: KVCacheManager = make_kv_cache(
            windows=world.plan.windows,
            num_blocks=instance.num_blocks,
            max_num_requests=world.plan.batch_size,
            has_prefix_cache=world.plan.has_prefix_cache and not instance.is_decode,
        )
        self.model = SimModel(self.kv_cache, num_lanes)
        self.ghosts: dict[TransferKey, Ghost] = {}
        self.ids: dict[TransferKey, int] = {}
        """Of requests that are not answered, by the only name that others know them by."""
        self.last_ids: dict[TransferKey, int] = {}
        """The same of all that ever were."""
        self.keys: dict[int, TransferKey] = {}
        self.common_log: list[tuple[Any, ...]] = []
        """What all ranks must do alike, in order."""
        self.minimum: list[int] = []
        world.loop.after(world.rng.random() * 0.2, self._timers)

    def scheduler_parts(self) -> dict[str, Any]:
        plan = self.world.plan
        return {
            "kv_cache": self.kv_cache,
            "max_model_len": MAX_MODEL_LEN,
            "eos_token_ids": frozenset({EOS}),
            "clock": self.world.loop.clock,
            "batch_size": plan.batch_size,
            "max_prefill_tokens": plan.max_prefill_tokens,
            "enable_chunked_prefill": plan.is_chunked,
        }

    # -- what happens to this rank alone -------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        self.local(self.records.on_message(decode_transfer(frame)))

    def _timers(self) -> None:
        if self.is_up:
            self.local(self.records.tick())
            self.world.loop.after(self.world.timer_interval(), self._timers)

    def local(self, actions: Sequence[Action]) -> None:
        left = self.carry_out(actions)
        assert not left, f"a local event concerns the scheduler: {left}"

    def carry_out(self, actions: Sequence[Action]) -> list[Action]:
        """Returns those that concern the scheduler."""
        left = []
        for action in actions:
            if isinstance(action, Send):
                if self.reaches(action):
                    self.world.deliver(action.peer.instance_id, action.rank, action.message)
            elif isinstance(action, FOR_SCHEDULER):
                self.common_log.append((type(action).__name__, action.key))
                self.look_at(action)
                left.append(action)
            else:
                self.on_action(action)
        return left

    def look_at(self, action: Action) -> None:
        """What the scheduler is told next."""

    def on_action(self, action: Action) -> None: ...

    def reaches(self, action: Send) -> bool:
        """Whether an address is known."""
        return True

    # -- what happens on every rank ------------------------------------------------------------

    def apply(self, event: Generate | Cancel) -> None:
        if isinstance(event, Cancel):
            if event.key in self.ids:
                self.scheduler.abort(self.ids[event.key])
        elif event.key not in self.ids:
            self._add(event)

    def _add(self, event: Generate) -> None:
        ghost, pair = event.ghost, event.pair
        request = Request(
            request_id=len(self.keys) + 1,
            prompt_token_ids=ghost.prompt,
            sampling=SamplingParams(max_tokens=ghost.max_tokens),
            seed=ghost.request,
            handoff=Handoff(
                room=event.key.room,
                attempt=event.key.attempt,
                pair=Pair(
                    prefill_id=pair.prefill.instance_id,
                    prefill_epoch=pair.prefill.epoch,
                    decode_id=pair.decode.instance_id,
                    decode_epoch=pair.decode.epoch,
                    bootstrap_url=self.world.instances[pair.prefill.instance_id].bootstrap_url,
                ),
                remaining_ms=event.remaining_ms,
            ),
        )
        former = self.ghosts.get(event.key)
        self.ghosts[event.key] = ghost
        self.keys[request.request_id] = event.key
        try:
            self.scheduler.add_request(request)
        except RequestError:
            if former is not None:
                self.ghosts[event.key] = former
            if self.rank == 0:
                reason = FinishReason.REFUSED
                self.instance.tell(
                    event.key, self._output(event.key, index=0, finish_reason=reason)
                )
            return
        self.ids[event.key] = self.last_ids[event.key] = request.request_id

    def tick(self, minimum: list[int]) -> None:
        """Act on the votes, compute a step, tell what came of it: `OnlineLoop.tick`."""
        self.minimum = minimum
        scheduler = self.scheduler
        tokens = scheduler.advance_queues()
        result = scheduler.run_step(self.model) if scheduler.has_work else None
        for request_id, new in result.new_tokens.items() if result is not None else ():
            tokens[request_id] = [*tokens.get(request_id, ()), *new]
        if result is not None or self.common_log:
            self.check()
        finished = {}
        for request in list(scheduler.finished_requests.values()):
            finished[request.request_id] = request
            scheduler.forget(request.request_id)
            self.ids.pop(self.keys[request.request_id], None)
        for request_id in {**tokens, **finished}:
            request = finished.get(request_id) or scheduler.request(request_id)
            self._tell(request, len(tokens.get(request_id, ())))

    def _tell(self, request: Request, num_new: int) -> None:
        """As `OutputSender` does."""
        key, token_ids = self.keys[request.request_id], request.output_token_ids
        reason = request.finish_reason if request.is_finished else None
        self.common_log.append(("told", key, num_new, reason))
        if token_ids != self.ghosts[key].answer[: len(token_ids)]:
            raise Violation(f"{self.ghosts[key]} gets {token_ids}, which is not its text")
        if self.rank == 0:
            index = len(token_ids) - num_new
            self.instance.tell(
                key,
                self._output(
                    key,
                    index=index,
                    token_ids=token_ids[index:],
                    finish_reason=reason,
                    finish_detail=request.finish_detail if request.is_finished else "",
                ),
            )

    def _output(self, key: TransferKey, **fields: Any) -> Output:
        return Output(
            instance_id=self.me.instance_id,
            epoch=self.me.epoch,
            peer_epoch=0,
            room=key.room,
            attempt=key.attempt,
            **fields,
        )

    # -- properties ----------------------------------------------------------------------------

    def holds(self, key: TransferKey, manager_key: str, block: int) -> bool:
        """Whether a block belongs to the attempt that this key names now."""
        request_id = self.last_ids.get(key)
        return request_id is not None and block in self.kv_cache.managers[manager_key]._blocks.get(
            request_id, ()
        )

    def check(self) -> None:
        """Blocks add up; every request is in exactly one queue."""
        self.kv_cache.check_integrity()
        scheduler = self.scheduler
        queues: list[Any] = [
            [request.request_id for request in scheduler.waiting_queue],
            scheduler.running_requests,
            scheduler.finished_requests,
            *scheduler._own_queues().values(),
        ]
        members = [request_id for queue in queues for request_id in queue]
        if sorted(members) != sorted(scheduler._requests):
            raise Violation(f"queues hold {members}, requests are {list(scheduler._requests)}")
        owners = {self.keys[idx] for m in self.kv_cache.managers.values() for idx in m._blocks}
        if owners != set(scheduler._holders):
            raise Violation(f"blocks are held by {owners}, known is {list(scheduler._holders)}")

    def lock_step(self) -> tuple[Any, ...]:
        """What is equal on all ranks after a tick."""
        held = [manager._blocks for manager in self.kv_cache.managers.values()]
        return self.common_log, held, self.scheduler._queue_lengths()

    def leftovers(self) -> str:
        """What is held although nobody needs it; "" = nothing."""
        if self.records.records:
            phases = {key: record.phase for key, record in self.records.records.items()}
            return f"holds {phases}"
        if self.kv_cache.num_used_blocks:
            return f"holds {self.kv_cache.format_usage()} blocks"
        if self.kv_cache._hashes or self.kv_cache._num_published:
            return f"holds hashes of {list(self.kv_cache._hashes)}"
        if self.scheduler.has_handoffs or self.scheduler._requests:
            return f"holds requests: {self.scheduler._queue_lengths()}"
        return ""
