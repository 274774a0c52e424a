"""What the checks cost, against Hydra's own composition of the same command; in time of the CPU."""

import time
from collections.abc import Callable
from typing import Any

from hydra.types import RunMode

from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import CONFIG_NAME, ConfigSpace
from tests.config.test_no_effect import TINY

NUM_TRIES = 3


def cpu_s(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def composed_by_hydra() -> float:
    """Seconds that Hydra takes for one composition."""
    loader = ConfigSpace().loader
    words = list(TINY)
    return cpu_s(
        lambda: loader.load_configuration(CONFIG_NAME, words, RunMode.RUN, from_shell=False)
    )


def checked() -> float:
    """Seconds of a pre-flight in a space of its own."""
    command, space = Command(overrides=TINY), ConfigSpace()
    return cpu_s(lambda: preflight(command, space))


def test_all_checks_cost_little_beside_the_composition() -> None:
    """Measured: 0.15 s beside 0.10 s of Hydra's own."""
    hydra = min(composed_by_hydra() for _ in range(NUM_TRIES))
    assert min(checked() for _ in range(NUM_TRIES)) < 5 * hydra
