"""Proof that a leg or a join comes from a process that knows the secret of the deployment."""

from inferkit.kv_transfer.signature import Signer
from inferkit.online.errors import ServiceError

HEADER = "x-inferkit-signature"


class Unsigned(ServiceError):
    """The caller does not prove that it knows the secret."""

    status = 401
    kind = "authentication_error"


class RouterSignatures:
    """Of requests between routers and instances, in one header.

    What was recorded may be sent again: a leg names epochs and an attempt, and a join or a leave
    lasts for a few seconds only.

    Args:
        secret: the same everywhere; empty = nothing is signed and everything is taken.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._signer = Signer(secret=secret, purpose="router")

    @property
    def is_on(self) -> bool:
        return self._signer.is_on

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        signature = self._signer.sign(method.encode(), path.encode(), body)
        return {HEADER: signature} if signature else {}

    def check(self, given: str, method: str, path: str, body: bytes = b"") -> None:
        """Raises:
        Unsigned: the header is missing or of another secret.
        """
        if not self._signer.is_valid(given, method.encode(), path.encode(), body):
            raise Unsigned(
                f"{HEADER}: {method} {path} is taken only with a signature by the secret of this "
                "deployment; give routers and instances the same one (disagg.secret_env)"
            )
