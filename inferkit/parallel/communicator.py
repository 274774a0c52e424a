"""Collectives of one group, as one of its ranks calls them.

Every rank of the group must enter each call, in the same order. A group of one rank communicates
nothing and copies nothing.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from inferkit.core.parallel_layout import Ranks
from inferkit.parallel.shared_memory import SharedMemory


class CollectiveTimer:
    """Seconds and calls that this process spent in collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0

    def add(self, start_s: float) -> None:
        self.seconds += time.perf_counter() - start_s
        self.num_calls += 1


REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Communicator:
    """A group of ranks; `process_group` is None where there is only this one.

    `shared` is memory of processes on one host, which then carries the tensors of the CPU.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        rank: int,
        process_group: Any = None,
        shared: SharedMemory | None = None,
        timer: CollectiveTimer,
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(rank)
        """Position of this process in the group."""
        self.size = len(ranks)
        self.process_group = process_group
        self.shared = shared
        self.timer = timer

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduced over all ranks ("sum", "min", "max"), in place where `x` is contiguous; equal
        on all of them."""
        if self.size == 1:
            return x
        start_s = time.perf_counter()
        x = x.contiguous()
        if self.shared is not None:
            self.shared.all_reduce(x.view(-1), op)
        else:
            dist.all_reduce(x, op=REDUCE_OPS[op], group=self.process_group)
        self.timer.add(start_s)
        return x

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        """Equal shapes of all ranks, joined along `dim` in rank order."""
        if self.size == 1:
            return x
        start_s = time.perf_counter()
        flat = x.contiguous().view(-1)
        if self.shared is not None:
            gathered = self.shared.all_gather(flat).view(self.size, *x.shape)
        else:
            gathered = x.new_empty((self.size, *x.shape))
            dist.all_gather_single(gathered.view(-1), flat, group=self.process_group)
        self.timer.add(start_s)
        if dim == 0:
            return gathered.flatten(0, 1)
        return torch.cat(gathered.unbind(), dim=dim)

    def all_gather_rows(self, x: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        """Rows of all ranks, rank i giving its `num_rows[i]`; [sum(num_rows), ...]."""
        if self.size == 1:
            return x
        longest = max(num_rows)
        gathered = self.all_gather(pad_rows(x, longest)).view(self.size, longest, *x.shape[1:])
        return torch.cat([rows[:count] for rows, count in zip(gathered, num_rows, strict=True)])

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> torch.Tensor:
        """Rows of `x`, the first `send_counts[0]` for rank 0 and so on; returns those received."""
        if self.size == 1:
            return x
        start_s = time.perf_counter()
        send, receive = list(send_counts), list(recv_counts)
        if self.shared is not None:
            received = self.shared.all_to_all(x.contiguous(), send, receive)
        else:
            received = x.new_empty((sum(receive), *x.shape[1:]))
            dist.all_to_all_single(
                received, x.contiguous(), receive, send, group=self.process_group
            )
        self.timer.add(start_s)
        return received

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] of partial sums -> this rank's [n, ...], summed over all ranks."""
        if self.size == 1:
            return x
        if self.shared is not None:
            return self.all_reduce(x.clone()).chunk(self.size)[self.rank]
        start_s = time.perf_counter()
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        dist.reduce_scatter_single(out, x.contiguous(), group=self.process_group)
        self.timer.add(start_s)
        return out

    def broadcast(self, x: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """The tensor of the group's rank `source`, written into `x`, which must be contiguous."""
        if self.size > 1:
            start_s = time.perf_counter()
            if self.shared is not None:
                self.shared.broadcast(x.view(-1), source)
            else:
                dist.broadcast(x, self.ranks[source], group=self.process_group)
            self.timer.add(start_s)
        return x

    def min(self, value: int) -> int:
        """The smallest of the ranks' values, which live on the host."""
        return int(self.all_reduce(torch.tensor(value), "min"))

    def max(self, value: int) -> int:
        """The largest of the ranks' values, which live on the host."""
        return int(self.all_reduce(torch.tensor(value), "max"))

    def close(self) -> None:
        """Give up memory and process group; the communicator is of no use afterwards."""
        if self.shared is not None:
            self.shared.close()
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.shared = self.process_group = None

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Picklable values of all ranks in rank order; for set-up and results, not for steps."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


def pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`x` with zero rows added up to `num_rows`."""
    if len(x) == num_rows:
        return x
    return torch.cat((x, x.new_zeros((num_rows - len(x), *x.shape[1:]))))
