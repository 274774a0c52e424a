"""Components of a user's own package, as a configuration names them by `_target_`."""

from typing import Any

from inferkit.core.protocols import Engine
from inferkit.kv_cache.kv_cache_manager import KVCacheManager
from inferkit.loader.default_loader import DefaultModelLoader
from inferkit.scheduler.scheduler import Phase, Scheduler, StepResult


class CheckedScheduler(Scheduler):
    """Checks the accounting of blocks and queues after every step."""

    def run_step(self, engine: Engine, phase: Phase | None = None) -> StepResult | None:
        result = super().run_step(engine, phase)
        self.kv_cache.check_integrity()
        waiting = {request.request_id for request in self.waiting_queue}
        assert not waiting & set(self.running_requests)
        assert not set(self.finished_requests) & (waiting | set(self.running_requests))
        if not self.running_requests:
            assert self.kv_cache.num_used_blocks == 0, "blocks are in use while nothing runs"
        return result


class CappedScheduler(Scheduler):
    """Never runs more than `cap` requests at a time."""

    def __init__(self, *, cap: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_num_requests = cap


class CountingKVCacheManager(KVCacheManager):
    """Counts allocations; `label` shows that parameters arrive."""

    def __init__(self, *, label: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.label = label
        self.num_allocations = 0

    def allocate_slots(self, request_id: int, **kwargs: Any) -> bool:
        self.num_allocations += 1
        return super().allocate_slots(request_id, **kwargs)


class ScalingLoader(DefaultModelLoader):
    """Multiplies the final norm by `factor`, which scales all logits."""

    def __init__(self, *, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def load(self, model: Any, source: Any, *, progress: Any) -> None:
        super().load(model, source, progress=progress)
        model.model.norm.weight.data.mul_(self.factor)
