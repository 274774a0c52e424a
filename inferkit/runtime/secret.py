"""The secret that instances share. It is never written anywhere."""

import os

from inferkit.config.schema import DisaggConfig
from inferkit.core.errors import ConfigError


def read_secret(disagg: DisaggConfig) -> bytes:
    """The shared secret of control messages; empty = there is none.

    Raises:
        ConfigError: the variable that should hold it is not set.
    """
    if disagg.secret_env is None:
        return b""
    secret = os.environ.get(disagg.secret_env, "")
    if not secret:
        raise ConfigError(
            f"disagg.secret_env={disagg.secret_env}: the environment variable "
            f"{disagg.secret_env} is not set; set it to the same secret on all nodes"
        )
    return secret.encode()
