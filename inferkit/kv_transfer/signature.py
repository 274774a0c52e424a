"""Proof that a message between two instances is of somebody who knows the shared secret.

Data on the wire stays readable; a message that was recorded may be sent again, so what is signed
must be harmless twice (it names epochs and attempts for that).
"""

import hashlib
import hmac


class Signer:
    """HMAC-SHA256 over parts of a message.

    Args:
        secret: shared by all instances; empty = nothing is signed and everything is accepted.
        purpose: what is signed for one purpose is not valid for another.
    """

    def __init__(self, *, secret: bytes, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose.encode()

    @property
    def is_on(self) -> bool:
        return bool(self._secret)

    def sign(self, *parts: bytes) -> str:
        """64 hexadecimal digits; empty without a secret."""
        if not self._secret:
            return ""
        found = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (self._purpose, *parts):
            # With its length, so that no two lists of parts give the same bytes.
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
        return found.hexdigest()

    def is_valid(self, signature: str, *parts: bytes) -> bool:
        """Whether `signature` is of these parts; compared in constant time."""
        expected = self.sign(*parts).encode()
        return not expected or hmac.compare_digest(expected, signature.encode("utf-8", "replace"))


class FrameSeal:
    """Of frames on a socket: an HMAC-SHA256 in front of each.

    Args:
        secret: shared by both ends; empty = frames stay as they are.
    """

    MAC_BYTES = hashlib.sha256().digest_size

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret

    def seal(self, frame: bytes) -> bytes:
        return self._mac(frame) + frame if self.secret else frame

    def open(self, sealed: bytes) -> bytes | None:
        """The frame; None = who has sent it does not know the secret."""
        if not self.secret:
            return sealed
        mac, frame = sealed[: self.MAC_BYTES], sealed[self.MAC_BYTES :]
        return frame if hmac.compare_digest(mac, self._mac(frame)) else None

    def _mac(self, frame: bytes) -> bytes:
        return hmac.digest(self.secret, frame, "sha256")


class HttpSignatures:
    """Of requests to a bootstrap server, and of its answers, in one header."""

    HEADER = "x-inferkit-signature"

    def __init__(self, *, secret: bytes) -> None:
        self._signer = Signer(secret=secret, purpose="bootstrap")

    def request_headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        return self._headers(self._signer.sign(*self._request(method, path, body)))

    def is_request_valid(self, given: str, method: str, path: str, body: bytes) -> bool:
        return self._signer.is_valid(given, *self._request(method, path, body))

    def answer_headers(self, path: str, status: int, body: bytes) -> dict[str, str]:
        return self._headers(self._signer.sign(*self._answer(path, status, body)))

    def is_answer_valid(self, given: str, path: str, status: int, body: bytes) -> bool:
        return self._signer.is_valid(given, *self._answer(path, status, body))

    def _request(self, method: str, path: str, body: bytes) -> tuple[bytes, ...]:
        return b"request", method.encode(), path.encode(), body

    def _answer(self, path: str, status: int, body: bytes) -> tuple[bytes, ...]:
        return b"answer", path.encode(), str(status).encode(), body

    def _headers(self, signature: str) -> dict[str, str]:
        return {self.HEADER: signature} if signature else {}
