"""How long each side waits before it gives up. No safety property depends on these numbers."""

from dataclasses import dataclass

from inferkit.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TransferTimers:
    """Seconds; the names are those of the `disagg` node (protocol section 5)."""

    lease_s: float = 30.0
    """Decode gives a link up this long after its last Status."""
    transfer_timeout_s: float = 300.0
    """Decode gives a transfer up this long after its admission."""
    handshake_timeout_s: float = 300.0
    """Prefill gives a request up whose Handshakes are not all there."""
    fence_timeout_s: float = 5.0
    """Decode fences this long after the first abort of a transfer."""
    stash_s: float = 60.0
    """Prefill keeps a Handshake whose request has not come."""
    abort_interval_s: float = 1.0
    """Decode repeats an abort until it is acknowledged."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"disagg.{name}={value} must be greater than 0 seconds")

    @property
    def renew_interval_s(self) -> float:
        """Decode renews its leases; two renewals may be lost before a lease ends."""
        return self.lease_s / 3

    @property
    def silence_s(self) -> float:
        """Prefill gives a transfer up that its decode rank has not renewed for so long."""
        return 2 * self.lease_s
