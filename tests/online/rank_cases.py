"""Cases of the loop that run on every rank of a pool (see tests/ranks.py)."""

from typing import Any

from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.place import RankPlace
from inferkit.parallel.comm_manager import CommManager
from tests.online.looping import Rank, generate, make_rank, stop


def tensor_parallel(place: RankPlace) -> dict[str, Any]:
    """One DP rank: only its leader hears the parent, all ranks must do the same."""
    comm = CommManager(
        ParallelLayout(world_size=place.world_size, attn_tp_size=place.world_size), rank=place.rank
    )
    is_leader = comm.is_dp_leader
    rank = make_rank(is_leader=is_leader, group=comm.group("tp_cpu_group"))
    messages = [generate(1, max_tokens=6), generate(2, prompt_len=30, remaining_ms=1500)]
    for tick in range(40):
        if is_leader and tick in (1, 3):
            rank.wire.put(messages[tick // 2])
            rank.wire.frames.append(b"\xc1")
        if is_leader and tick == 5:
            rank.clock.now_s += 2.0
        if is_leader and tick == 39:
            rank.wire.put(stop())
        rank.ticks(1)
        if rank.loop.is_over:
            break
    rank.check_empty()
    result = _steps(rank) | {"ticks": rank.loop.num_ticks, "sent": len(rank.wire.sent)}
    comm.close()
    return result


def data_parallel(place: RankPlace, attn_tp_size: int) -> dict[str, Any]:
    """DP ranks that compute together: all step when one has work, and leave in one tick."""
    layout = ParallelLayout(
        world_size=place.world_size, attn_tp_size=attn_tp_size, moe_tp_size=attn_tp_size
    )
    comm = CommManager(layout, rank=place.rank)
    group = comm.group("tp_cpu_group") if attn_tp_size > 1 else None
    rank = make_rank(
        is_leader=comm.is_dp_leader,
        group=group,
        dp_group=comm.group("dp_group"),
        dp_rank=comm.dp_rank,
    )
    message = generate(comm.dp_rank + 1, max_tokens=3 + 4 * comm.dp_rank)
    for tick in range(60):
        if comm.is_dp_leader and tick == 2 + comm.dp_rank:
            rank.wire.put(message)
        if comm.is_dp_leader and tick == 20 + 5 * comm.dp_rank:
            rank.wire.put(stop())
        rank.ticks(1)
        if rank.loop.is_over:
            break
    rank.check_empty()
    result = _steps(rank) | {
        "ticks": rank.loop.num_ticks,
        "tokens": rank.wire.tokens(message.key),
        "waits": rank.wire.waits,
    }
    comm.close()
    return result


def _steps(rank: Rank) -> dict[str, Any]:
    return {
        "rows": [[row.token_ids for row in batch.rows] for batch in rank.engine.batches],
        "dummies": [batch.is_dummy for batch in rank.engine.batches],
    }
