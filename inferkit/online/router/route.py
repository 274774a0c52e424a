"""Two instances that can serve a request together, and the numbers of attempts."""

import secrets
from dataclasses import dataclass

from inferkit.core.request import Pair
from inferkit.kv_transfer.identity import NONCE_BITS, Peer, make_attempt
from inferkit.online.facts import InstanceFacts, Side

RouteKey = tuple[Peer, Peer]


@dataclass(frozen=True)
class Route:
    """A pair of instances, each in one life."""

    prefill: InstanceFacts
    decode: InstanceFacts

    @property
    def key(self) -> RouteKey:
        return self.prefill.peer, self.decode.peer

    def side(self, side: Side) -> InstanceFacts:
        return self.prefill if side is Side.PREFILL else self.decode

    @property
    def pair(self) -> Pair:
        """As both legs are told."""
        return Pair(
            prefill_id=self.prefill.instance_id,
            prefill_epoch=self.prefill.epoch,
            decode_id=self.decode.instance_id,
            decode_epoch=self.decode.epoch,
            bootstrap_url=self.prefill.bootstrap_url,
        )


class AttemptNumbers:
    """Numbers of attempts; no other router and no former life of this one has used them."""

    def __init__(self) -> None:
        self._nonce = secrets.randbits(NONCE_BITS)
        self._counter = 0

    def next(self) -> int:
        if self._counter >= 1 << NONCE_BITS:
            self._nonce, self._counter = secrets.randbits(NONCE_BITS), 0
        attempt = make_attempt(self._nonce, self._counter)
        self._counter += 1
        return attempt
