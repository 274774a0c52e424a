"""What the check of a grid costs, against Hydra's own composition of the same cells."""

import time

from hydra.types import RunMode

from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace
from tests.sweep.test_plan import TINY

AXES = ("parallel=tp1,tp2,dp2,tp4", "scheduler.batch_size=range(4,204,4)")
SAMPLE = 20


def test_two_hundred_cells_cost_less_than_their_composition() -> None:
    """It takes 0.2 to 0.3 of it; Hydra composes a cell in 0.1 to 0.2 s, so it is seconds."""
    start_s = time.perf_counter()
    verdict = preflight(Command(flags=("-m",), overrides=(*TINY, *AXES)), ConfigSpace())
    checked_s = time.perf_counter() - start_s

    space = ConfigSpace()
    sample = verdict.cells[::SAMPLE]
    start_s = time.perf_counter()
    for cell in sample:
        space.loader.load_configuration(
            config_name=space.config_name,
            overrides=list(cell.overrides),
            run_mode=RunMode.RUN,
            from_shell=False,
        )
    composed_s = (time.perf_counter() - start_s) * SAMPLE

    assert verdict.is_good, verdict.message
    assert len(verdict.cells) == 200
    assert checked_s < composed_s
