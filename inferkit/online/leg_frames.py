"""Messages in an HTTP body: each after its length in four bytes, big endian."""

import struct

LEG_PATH = "/leg"
MAX_FRAME_BYTES = 16 << 20
"""Far more than the tokens and logprobs of one step of one request."""
_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The bytes are no sequence of frames."""


def pack_frame(frame: bytes) -> bytes:
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Puts frames together from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_between_frames(self) -> bool:
        return not self._buffer

    def feed(self, data: bytes) -> list[bytes]:
        """Frames that are complete now.

        Raises:
            FrameError: a length that no frame has.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes; allowed are {MAX_FRAME_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames
