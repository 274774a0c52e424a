"""Collectives over real processes: shared memory and gloo give the same, ranks get equal bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.place import RankPlace
from inferkit.parallel import shared_memory
from inferkit.parallel.comm_manager import CommManager
from inferkit.parallel.communicator import Communicator

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def with_world(place: RankPlace, is_shared: bool, body: Callable[[Communicator], Any]) -> Any:
    """Run `body` with a communicator of all ranks; nodes of one rank each share no memory."""
    layout = ParallelLayout(world_size=place.world_size)
    comm = CommManager(layout, rank=place.rank, local_world_size=None if is_shared else 1)
    try:
        assert (comm.world.shared is not None) is is_shared
        return body(comm.world)
    finally:
        comm.close()


def part(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(num_rows, 33, generator=generator) * 100).round().to(dtype)


def all_collectives(place: RankPlace, is_shared: bool, num_rows: int, slot_bytes: int) -> Any:
    """The sums that this rank got, of every type."""
    shared_memory.SLOT_BYTES = slot_bytes
    ranks = range(place.world_size)
    return with_world(place, is_shared, lambda group: check(group, ranks, num_rows))


def check(group: Communicator, ranks: range, num_rows: int) -> list[list[list[float]]]:
    sums = []
    for dtype in DTYPES:
        parts = [part(rank, num_rows, dtype) for rank in ranks]
        own = parts[group.rank]
        total = group.all_reduce(own.clone())
        sums.append(total.double().tolist())
        expected = torch.stack(parts).double().sum(0)
        tolerance = {"atol": 8.0, "rtol": 0.02} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(total.double(), expected, **({"atol": 0, "rtol": 0} | tolerance))
        everyone = group.all_gather(total)
        assert all(torch.equal(copy, total) for copy in everyone.chunk(group.size))
        assert torch.equal(group.all_reduce(own.clone(), "max"), torch.stack(parts).amax(0))
        assert torch.equal(group.all_reduce(own.clone(), "min"), torch.stack(parts).amin(0))
        assert torch.equal(group.all_gather(own), torch.cat(parts))
        assert torch.equal(group.all_gather(own, dim=1), torch.cat(parts, dim=1))
        assert torch.equal(group.broadcast(own.clone(), source=1), parts[1])
        counts = [min(num_rows, rank) for rank in ranks]
        uneven = [x[:count] for x, count in zip(parts, counts, strict=True)]
        assert torch.equal(group.all_gather_rows(uneven[group.rank], counts), torch.cat(uneven))
        # Rank r sends (r + s) % 3 rows to rank s, the first of its tensor to rank 0.
        sent = [[(rank + target) % 3 for target in ranks] for rank in ranks]
        buffers = [part(rank + 50, sum(sent[rank]), dtype) for rank in ranks]
        received = group.all_to_all(
            buffers[group.rank], sent[group.rank], [sent[rank][group.rank] for rank in ranks]
        )
        meant = [buffers[rank].split(sent[rank])[group.rank] for rank in ranks]
        assert torch.equal(received, torch.cat(meant))
        summed = group.reduce_scatter(torch.cat([own] * group.size))
        torch.testing.assert_close(summed, total, **tolerance)
    assert group.min(group.rank + 3) == 3 and group.max(group.rank) == group.size - 1
    assert group.all_gather_objects({"rank": group.rank})[1] == {"rank": 1}
    return sums


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    "num_rows,slot_bytes", [(1, 1 << 20), (0, 1 << 20), (300, 1 << 20), (40, 1056)]
)
def test_every_collective_on_four_ranks(ranks, is_shared, num_rows, slot_bytes):
    """40 rows of 33 numbers in slots of 1056 bytes take several rounds."""
    of_ranks = ranks(4).run(all_collectives, is_shared, num_rows, slot_bytes)
    exact = sum(part(rank, num_rows, torch.int64) for rank in range(4)).tolist()
    assert of_ranks[0][DTYPES.index(torch.int64)] == exact
    assert of_ranks == [of_ranks[0]] * 4  # to the last bit


def run_ahead(place: RankPlace, num_calls: int) -> list[float]:
    """The sums of ranks of different speed: no slot is overwritten while another rank reads it."""

    def body(group: Communicator) -> list[float]:
        sums = []
        for call in range(num_calls):
            x = torch.full((5,), float(call * (group.rank + 1)))
            if (call + group.rank) % 3 == 0:
                torch.randn(20_000).sort()
            sums.append(group.all_reduce(x)[0].item())
        return sums

    return with_world(place, True, body)


def test_ranks_that_run_ahead_disturb_nobody(ranks):
    sums = [call * (1 + 2 + 3 + 4) for call in range(300)]
    assert ranks(4).run(run_ahead, 300) == [sums] * 4
