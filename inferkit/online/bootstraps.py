"""Which bootstrap servers a decode instance may ask: those of its configuration and its router.

An address that comes with a request is never followed unless it is one of them.
"""

from collections.abc import Awaitable, Callable, Iterable


class KnownBootstraps:
    """Args:
    listed: addresses of the configuration.
    ask: fetches what the router knows now and calls `learn`; None without a router.
    """

    def __init__(
        self, listed: Iterable[str] = (), *, ask: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.ask = ask
        self._listed = frozenset(url.rstrip("/") for url in listed)
        self._learned: frozenset[str] = frozenset()

    @property
    def urls(self) -> frozenset[str]:
        return self._listed | self._learned

    def learn(self, urls: Iterable[str]) -> None:
        """What the router knows, instead of what it knew."""
        self._learned = frozenset(url.rstrip("/") for url in urls)

    async def knows(self, url: str) -> bool:
        """A prefill instance may have joined a moment ago, so the router is asked first."""
        if url in self.urls:
            return True
        if self.ask is not None:
            await self.ask()
        return url in self.urls
