"""Which devices each instance of a cluster sees: all share one host."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inferkit.core.errors import ConfigError

DEVICES = Path("/dev")


class DeviceKind:
    """How a kind of device is counted and hidden.

    Args:
        variable: environment variable that lists what a process may see.
        pattern: of its device files.
    """

    def __init__(self, variable: str, pattern: str) -> None:
        self.variable = variable
        self.pattern = re.compile(pattern)


KINDS: Mapping[str, DeviceKind] = {
    "cuda": DeviceKind("CUDA_VISIBLE_DEVICES", r"nvidia\d+"),
    "npu": DeviceKind("ASCEND_RT_VISIBLE_DEVICES", r"davinci\d+"),
}
"""Module of a platform under `inferkit.platforms` -> its devices; others share the host."""


def shared_out(
    platform_target: str,
    num_ranks: Sequence[int],
    *,
    variables: Mapping[str, str],
    devices: Path = DEVICES,
) -> list[dict[str, str]]:
    """Environment of each instance: a run of devices of its own, one per rank.

    Args:
        platform_target: `platform._target_` of all instances.
        num_ranks: of each instance.
        variables: this process's environment; devices that are hidden from it stay hidden.

    Raises:
        ConfigError: there are not enough devices.
    """
    module = platform_target.rpartition(".")[0].rpartition(".")[2]
    kind = KINDS.get(module)
    if kind is None:
        return [{} for _ in num_ranks]
    visible = [name.strip() for name in variables.get(kind.variable, "").split(",") if name.strip()]
    if not visible:
        found = sum(1 for path in devices.glob("*") if kind.pattern.fullmatch(path.name))
        visible = [str(index) for index in range(found)]
    if len(visible) < sum(num_ranks):
        raise ConfigError(
            f"the instances of this cluster have {sum(num_ranks)} ranks, but there are "
            f"{len(visible)} devices ({kind.variable}={','.join(visible)}); choose fewer instances "
            "or a smaller parallel=<option>"
        )
    return list(_runs(kind.variable, visible, num_ranks))


def _runs(
    variable: str, visible: Sequence[str], num_ranks: Sequence[int]
) -> Iterator[dict[str, str]]:
    first = 0
    for count in num_ranks:
        yield {variable: ",".join(visible[first : first + count])}
        first += count
