"""Typed reading of Hugging Face configuration keys, with all faults of a file in one error.

Knows types and ranges, not what a key means: that is for a family's `arch.py`.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from inferkit.core.errors import ConfigError

USER_ARCH: Final = "model.arch"
"""The origin of keys that a user wrote; anything else names a file."""


class ConfigFile(dict[str, Any]):
    """The keys of a configuration file, which remember where they came from."""

    def __init__(self, keys: Mapping[str, Any], origin: str) -> None:
        super().__init__(keys)
        self.origin = origin


class ConfigReader:
    """Reads keys and collects faults; `raise_faults` ends the reading.

    A key that is absent or null has its default. A faulty one yields a harmless value, so that
    reading goes on and every fault is found.
    """

    def __init__(self, config: Mapping[str, Any], origin: str = USER_ARCH) -> None:
        self.config = config
        self.origin = origin
        self.faults: list[str] = []

    @classmethod
    def of(cls, config: Mapping[str, Any], origin: str | None) -> "ConfigReader":
        """Of what `parse_arch` is called with; origin None = that of a ConfigFile, or the user."""
        if origin is None:
            origin = config.origin if isinstance(config, ConfigFile) else USER_ARCH
        return cls(config, origin)

    @property
    def is_user_written(self) -> bool:
        return self.origin.startswith(USER_ARCH)

    def label(self, key: str) -> str:
        """How a message names a key: `model.arch.KEY`, or `KEY in PATH/config.json`."""
        return f"{self.origin}.{key}" if self.is_user_written else f"{key} in {self.origin}"

    def fault(self, key: str, allowed: str) -> None:
        """Note that `key` has a value that cannot run; `allowed` says what can."""
        self.faults.append(f"{self.label(key)}={self.config.get(key)!r}: {allowed}")

    def missing(self, key: str, hint: str) -> None:
        self.faults.append(f"{self.label(key)} is missing: {hint}")

    def raise_faults(self) -> None:
        """Raise one ConfigError with a line for each fault, if there is any."""
        if self.faults:
            raise ConfigError("\n".join(self.faults))

    def nested(self, key: str) -> "ConfigReader":
        """Reader of the dictionary at `key`; its faults are added to this reader's."""
        value = self.config.get(key)
        reader = ConfigReader(value if isinstance(value, Mapping) else {}, self.label(key))
        reader.faults = self.faults
        return reader

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer >= minimum; without a default the key must be there."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                self.missing(key, f"give an integer >= {minimum}")
                return minimum
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fault(key, f"allowed is an integer >= {minimum}")
            return minimum
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float | None = None,
        minimum: float | None = None,
    ) -> float:
        """A finite number > above and >= minimum; without a default the key must be there."""
        value = self.config.get(key)
        limit = f" > {above:g}" if above is not None else ""
        limit += f" >= {minimum:g}" if minimum is not None else ""
        if value is None:
            if default is None:
                self.missing(key, f"give a number{limit}")
                return 1.0
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            self.fault(key, f"allowed is a number{limit}")
            return 1.0
        if (above is not None and value <= above) or (minimum is not None and value < minimum):
            self.fault(key, f"allowed is a number{limit}")
            return 1.0
        return float(value)

    def optional_number(self, key: str, *, above: float | None = None) -> float | None:
        return self.number(key, above=above) if self.has(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(key, "allowed is true or false")
            return default
        return value

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """One token id or a list of them; an explicit null means none."""
        if key not in self.config:
            return default
        value = self.config[key]
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            self.fault(key, "allowed is a token id >= 0, a list of them, or null")
            return ()
        return tuple(ids)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers > 0."""
        value = self.config.get(key)
        if value is None:
            self.missing(key, f"give a list of {length} numbers > 0")
            return (1.0,) * length
        is_list = isinstance(value, list | tuple) and len(value) == length
        if not is_list or any(
            isinstance(x, bool) or not isinstance(x, int | float) or not is_finite(x) or x <= 0
            for x in value
        ):
            self.fault(key, f"allowed is a list of {length} numbers > 0")
            return (1.0,) * length
        return tuple(float(x) for x in value)

    def check_known(self, known: Collection[str]) -> None:
        """Keys outside `known` are faults with a suggestion."""
        for key in self.config:
            if key in known:
                continue
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
            )
            self.faults.append(f"{self.label(key)} is not a known key; {hint}")


def check_same_meaning(
    user_arch: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    origin: str,
    parse_arch: Callable[..., Any],
    known: Collection[str],
) -> None:
    """Keys of `model.arch` beside a config.json at `origin` must mean what the file means.

    Args:
        parse_arch: the family's; what it returns is compared.
        known: keys that a user may write.

    Raises:
        ConfigError: a line for each key that is unknown or differs.
    """
    in_file = parse_arch(config, origin=origin)
    reader = ConfigReader(user_arch)
    reader.check_known(known)
    for key in user_arch:
        if key not in known:
            continue
        try:
            merged = parse_arch({**config, key: user_arch[key]}, origin=origin)
        except ConfigError:
            merged = None
        if merged != in_file:
            reader.fault(key, f"{origin} has {config.get(key)!r}; the file decides, drop the key")
    reader.raise_faults()


def is_finite(value: float) -> bool:
    return value - value == 0.0
