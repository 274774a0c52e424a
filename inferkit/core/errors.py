"""The exception tree of inferkit.

    InferkitError
      ConfigError        a configuration that cannot run: key, value, what is allowed, what to do
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


class ModelLoadError(InferkitError, ValueError):
    """Model files are absent, incomplete, or do not fit the model class."""


class RequestError(InferkitError, ValueError):
    """One request cannot be served; others are not affected."""


class KVCacheError(InferkitError, RuntimeError):
    """KV block accounting is broken (double free, bad id, leaked block)."""


class WorkerError(InferkitError, RuntimeError):
    """A worker process ended without its result."""
