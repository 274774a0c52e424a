"""Whether requests that cannot be stopped any more can all come to their end.

A decode instance gives blocks back only when a request ends, or when its blocks are copied to a
host store of fixed size. Were blocks handed out as long as there are any, requests could hold all
of them, each in need of one more and none small enough for the store: nothing would ever move.
So a block is handed out only if afterwards the *eldest* request can still get all it may need:

    free + what the store takes of the others  >=  largest need of any - held by the eldest

The eldest then ends, gives back at least what it held, and the same holds for the next eldest;
retracting a request, resuming it and ending it never make it false. Pure arithmetic on blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """One pool as it would be after the blocks in question are taken.

    Args:
        num_free: blocks, those of a copy that is under way included.
        num_host_free: blocks of the host store.
        largest_need: blocks that the longest request in flight may come to hold.
        held_by_eldest: 0 while it is in the host store.
        held_by_others: of each other request that is on the device, or comes to it.
        max_retractions: requests that the store takes, for the sake of other pools; None = any.
    """

    num_free: int
    num_host_free: int
    largest_need: int
    held_by_eldest: int
    held_by_others: Sequence[int]
    max_retractions: int | None = None

    @property
    def is_enough(self) -> bool:
        missing = self.largest_need - self.held_by_eldest - self.num_free
        if missing <= 0:
            return True
        if missing > min(self.num_host_free, sum(self.held_by_others)):
            return False
        return missing <= most_that_fits(
            self.held_by_others, self.num_host_free, self.max_retractions
        )


def most_that_fits(sizes: Sequence[int], capacity: int, max_count: int | None = None) -> int:
    """The largest sum of some of `sizes` that is at most `capacity`.

    Bit n of an integer says that a sum of n can be made; one integer per number of summands where
    that is bounded.
    """
    mask = (1 << (capacity + 1)) - 1
    if max_count is None or max_count >= len(sizes):
        sums = 1
        for size in sizes:
            sums |= sums << size & mask
        return sums.bit_length() - 1
    by_count = [1] + [0] * max_count
    for size in sizes:
        for count in range(max_count, 0, -1):
            by_count[count] |= by_count[count - 1] << size & mask
    return max(sums.bit_length() for sums in by_count) - 1
