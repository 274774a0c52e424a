"""Where one worker process stands among all ranks of its run."""

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Facts of a process, never of the configuration."""

    rank: int = 0
    local_rank: int = 0
    """Position among the ranks of this node."""
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this node."""
    master_addr: str = LOOPBACK
    """Host of rank 0, where the ranks meet."""
    master_port: int = 0
    is_served: bool = False
    """Something else than rank 0, for instance torchrun, listens there."""
    local_ip: str = LOOPBACK
    """Address by which other nodes reach this one."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or not (
            0 <= self.local_rank < self.local_world_size <= self.world_size
        ):
            raise ValueError(
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}: ranks count from 0 and lie below the number of ranks"
            )
