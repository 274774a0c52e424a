"""Names of derived values, for a shell that completes them."""

from collections.abc import Sequence

from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.inspect.take import take_snapshot


def derived_names(overrides: Sequence[str], space: ConfigSpace) -> list[str]:
    """`rank.heads`, ... of what the words come to; empty where they come to nothing.

    Raises:
        HydraException: a file of options is broken.
    """
    try:
        return [one.name for one in take_snapshot(overrides, space).derived]
    except ConfigError:
        return []
