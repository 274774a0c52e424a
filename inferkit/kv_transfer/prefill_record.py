"""One hand-off as a prefill rank sees it, and its links to the decode ranks that it feeds."""

from dataclasses import dataclass, field
from enum import StrEnum

from inferkit.core.transfer_messages import Handshake, Status
from inferkit.kv_transfer.actions import FirstToken
from inferkit.kv_transfer.identity import Peer, TransferKey


class PrefillPhase(StrEnum):
    BOOTSTRAPPING = "bootstrapping"
    """Handshakes are missing; holds nothing."""
    READY = "ready"
    """May take its blocks; holds nothing."""
    SENDING = "sending"
    """Computes and sends; holds blocks."""
    ABORTING = "aborting"
    """Posts nothing more; holds blocks until no own write is in flight."""


ACTIVE = frozenset(PrefillPhase) - {PrefillPhase.ABORTING}
"""Phases in which a room is busy."""


class Step(StrEnum):
    """How far one link is; each step is posted when the one before it is placed."""

    BLOCKS = "blocks"
    SLOT_BODY = "slot_body"
    COMMIT_WORD = "commit_word"
    DONE = "done"


@dataclass(eq=False, slots=True)
class PrefillLink:
    """What this rank owes one decode rank."""

    record: "PrefillRecord"
    handshake: Handshake
    renewed_at: float
    step: Step = Step.BLOCKS
    num_posted: int = 0
    """Chunks of the record that were posted."""
    in_flight: set[int] = field(default_factory=set)
    """Write ids that the engine has not ended."""
    is_lost: bool = False
    """A write may land although nothing is in flight."""
    wants_drain_ack: bool = False
    final_status: Status | None = None

    @property
    def is_dummy(self) -> bool:
        """Nothing is sent here; the Handshake only tells this rank that it waits for none."""
        return self.handshake.required_dst_info_num == 0

    @property
    def is_drained(self) -> bool:
        return not self.in_flight and not self.is_lost


@dataclass(eq=False, slots=True)
class PrefillRecord:
    key: TransferKey
    decode: Peer
    deadline: float
    bootstrap_until: float
    phase: PrefillPhase = PrefillPhase.BOOTSTRAPPING
    links: dict[int, PrefillLink] = field(default_factory=dict)
    """Decode rank -> link."""
    chunks: list[int] = field(default_factory=list)
    """Ends in tokens of the computed chunks."""
    first_token: FirstToken | None = None
    is_finishing: bool = False
    """The first token ends the request: no slot is written."""
    fault: str = ""
    """Why this rank wants the record to fail."""

    @property
    def has_all_handshakes(self) -> bool:
        required = self.required_dst_info_num
        return required is not None and len(self.links) == max(1, required)

    @property
    def required_dst_info_num(self) -> int | None:
        """As the first Handshake says; None before it."""
        for link in self.links.values():
            return link.handshake.required_dst_info_num
        return None

    @property
    def num_in_flight(self) -> int:
        return sum(len(link.in_flight) for link in self.links.values())
