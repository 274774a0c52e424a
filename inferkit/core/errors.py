"""The exception tree of inferkit.

    InferkitError
      ConfigError        a configuration that cannot run: key, value, what is allowed, what to do
        AddressError     a port or an address that this machine does not give
      ComponentError     a component that the configuration names failed while it was built
      ModelLoadError     model files that are absent, incomplete or of another shape
      RequestError       one request that cannot be served; the engine goes on
      KVCacheError       broken block accounting: a programmer error that must stop the run
      WorkerError        a worker process died or reported a failure

Every message names the key or object, the value it had, what is allowed and what to do.
"""


class InferkitError(Exception):
    """Base of everything that a user, a peer or a broken invariant can cause."""


class ConfigError(InferkitError, ValueError):
    """A configuration that cannot run."""


class AddressError(ConfigError):
    """A port or an address cannot be used here.

    Attributes:
        given: `key=value`.
        problem: what follows it.
        key: of the port or the address.
        fix: an override with which the same command works; empty = none is known.
    """

    def __init__(self, given: str, problem: str, *, key: str, fix: str = "") -> None:
        super().__init__(f"{given} {problem}")
        self.given = given
        self.problem = problem
        self.key = key
        self.fix = fix


class ComponentError(InferkitError, RuntimeError):
    """A component that the configuration names failed while it was imported or built.

    The message tells the key, what the component raised, and its own file and line.
    """


class ModelLoadError(InferkitError, ValueError):
    """Model files are absent, incomplete, or do not fit the model class."""


class RequestError(InferkitError, ValueError):
    """One request cannot be served; others are not affected."""


class KVCacheError(InferkitError, RuntimeError):
    """KV block accounting is broken (double free, bad id, leaked block)."""


class WorkerError(InferkitError, RuntimeError):
    """A worker process ended without its result."""
