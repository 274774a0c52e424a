"""Requests of one DP rank: by (room, attempt) on the wire, by small integers in its scheduler."""

from inferkit.core.errors import RequestError
from inferkit.core.messages import Generate
from inferkit.core.request import Handoff, Request
from inferkit.online.limits import check_sampling, check_token_ids

Key = tuple[int, int]


class RequestTable:
    """Numbers requests in the order of their messages, so all ranks of a DP rank number alike.

    The numbers never leave this process: who asks knows its request by room and attempt.
    """

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._last_id = 0
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message: Generate) -> Request | None:
        """The request of a message; None where this attempt runs already.

        Raises:
            RequestError: values that would harm other requests.
        """
        if message.key in self._ids:
            return None
        if not message.token_ids:
            raise RequestError("prompt: it holds no token")
        if message.sampling.max_tokens is None:
            raise RequestError("max_tokens: it is missing; who tokenises also says how many")
        check_token_ids("prompt", message.token_ids, self.vocab_size)
        check_sampling(message.sampling, self.vocab_size)
        self._last_id += 1
        self._ids[message.key] = self._last_id
        self._keys[self._last_id] = message.key
        return Request(
            request_id=self._last_id,
            prompt_token_ids=message.token_ids,
            sampling=message.sampling,
            seed=message.seed,
            sample_index=message.sample_index,
            handoff=_handoff(message),
        )

    def id_of(self, key: Key) -> int | None:
        return self._ids.get(key)

    def key_of(self, request_id: int) -> Key:
        return self._keys[request_id]

    def remove(self, request_id: int) -> Key:
        """Forget a request that is over."""
        key = self._keys.pop(request_id)
        del self._ids[key]
        return key


def _handoff(message: Generate) -> Handoff | None:
    if message.pair is None:
        return None
    return Handoff(
        room=message.room,
        attempt=message.attempt,
        pair=message.pair,
        remaining_ms=message.remaining_ms,
    )
