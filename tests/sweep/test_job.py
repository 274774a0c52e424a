from dataclasses import replace

from inferkit.core.sampling_params import MAX_SEED
from inferkit.sweep.job import with_run_seed
from tests.config.configs import BASE, changed, in_role


def test_a_run_that_samples_without_a_seed_gets_one_to_repeat_it() -> None:
    cfg = changed(data__temperature=0.7)
    drawn = [with_run_seed(cfg).data.run_seed for _ in range(2)]

    assert all(seed is not None and 0 <= seed < MAX_SEED for seed in drawn)
    assert drawn[0] != drawn[1]


def test_other_runs_stay_as_they_are() -> None:
    seeded = changed(data__temperature=0.7, data__seed=1)
    repeated = changed(data__temperature=0.7, data__run_seed=1)
    service = replace(in_role("serve"), data=changed(data__temperature=0.7).data)

    for cfg in (BASE, seeded, repeated, service):
        assert with_run_seed(cfg) == cfg
