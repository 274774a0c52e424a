"""One transfer as a decode rank sees it, and its links to the prefill ranks that feed it."""

from dataclasses import dataclass, field
from enum import StrEnum

from inferkit.core.transfer_messages import Status, TransferState
from inferkit.kv_transfer.actions import BlockIds
from inferkit.kv_transfer.identity import Peer, TransferKey
from inferkit.kv_transfer.rank_mapping import LinkTarget

FINAL = {TransferState.OK, TransferState.FINISHED, TransferState.FAILED}


class DecodePhase(StrEnum):
    WAITING = "waiting"
    """For the route to prefill, for blocks and a slot; holds nothing."""
    ADMITTED = "admitted"
    """Prefill may write; holds blocks, slot and lease."""
    RUNNING = "running"
    """Landed: an ordinary request with blocks. No peer and no timer touches it any more."""
    COPYING = "copying"
    """To host memory; holds blocks and a host area."""
    RETRACTED = "retracted"
    """Holds a host area."""
    DRAINING = "draining"
    """Answered, but a write may still land; holds blocks and slot."""


ACTIVE = frozenset(DecodePhase) - {DecodePhase.DRAINING}
"""Phases in which a room is busy."""


@dataclass(eq=False, slots=True)
class DecodeLink:
    target: LinkTarget
    renewed_at: float
    status: Status | None = None
    is_drained: bool = False

    @property
    def is_dummy(self) -> bool:
        return self.target.required_dst_info_num == 0

    @property
    def state(self) -> TransferState | None:
        return None if self.status is None else self.status.state

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


@dataclass(eq=False, slots=True)
class DecodeRecord:
    key: TransferKey
    prefill: Peer
    kv_len: int
    """Prompt tokens whose KV is to come."""
    seed: int
    """Of the sampler; prefill must have used the same."""
    deadline: float
    phase: DecodePhase = DecodePhase.WAITING
    transfer_id: int = 0
    """0 = not admitted."""
    block_ids: BlockIds = field(default_factory=dict)
    slot: int | None = None
    all_links: dict[int, DecodeLink] = field(default_factory=dict)
    """Prefill rank -> link, those that are only told that they send nothing included."""
    is_admissible: bool = False
    """Every rank knows the route: blocks and slot may be taken."""
    give_up_at: float = 0.0
    """End of the transfer's time limit."""
    fence_at: float = 0.0
    next_abort_at: float = 0.0
    is_fencing: bool = False
    is_fenced: bool = False
    is_quarantined: bool = False
    """The engine cannot fence: only a DrainAck, or the end of this process, frees the blocks."""
    is_verified: bool = False
    """Slot, Status of every link and content agree."""
    is_copied: bool = False
    is_cancelled: bool = False
    fault: str = ""
    """Why this rank wants the transfer to fail."""

    @property
    def links(self) -> list[DecodeLink]:
        """Those that move bytes: each must end, and each must be drained."""
        return [link for link in self.all_links.values() if not link.is_dummy]

    @property
    def is_drained(self) -> bool:
        return self.is_fenced or all(link.is_drained for link in self.links)

    def has_all(self, state: TransferState) -> bool:
        """Every link is in this state, and there is one."""
        links = self.links
        return bool(links) and all(link.state is state for link in links)

    def lease_fault(self, now: float, lease_s: float) -> str:
        """Why the lease is over, or "" while it is not.

        A link that has not ended must be heard of; when all have ended, the slot must show soon.
        """
        open_links = [link for link in self.links if not link.is_final]
        for link in open_links:
            if now >= link.renewed_at + lease_s:
                return f"prefill rank {link.target.prefill_rank} was silent for {lease_s} s"
        if not open_links and now >= max(link.renewed_at for link in self.links) + lease_s:
            return f"every link ended, but the slot shows nothing after {lease_s} s"
        return ""
