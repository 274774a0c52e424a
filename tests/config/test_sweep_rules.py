import pytest

from inferkit.config.schema import SloConfig
from inferkit.config.sweep_rules import METRICS, is_higher_better, objective_of, slo_limits
from tests.config.configs import changed, faults

OFFLINE = {"runner___target_": "inferkit.offline.runner.OfflineRunner"}


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_time(name: str, value: float) -> None:
    (fault,) = faults(sweep__slo=SloConfig(**{name: value}))

    assert fault == (
        f"sweep.slo.{name}={value}: is out of range; allowed is a number of seconds > 0, or null "
        "for no limit"
    )


def test_the_time_limit_of_a_cell_is_a_time() -> None:
    (fault,) = faults(sweep__cell_timeout_s=0.0)

    assert fault.startswith("sweep.cell_timeout_s=0.0: is out of range")


@pytest.mark.parametrize(
    ("objective", "meant"),
    [
        ("ttft", "ttft_s.p50"),
        ("ttft_s", "ttft_s.p50"),
        ("ttft_s.p95", "ttft_s.p99"),
        ("tpot.p90", "tpot_s.p90"),
        ("output_token_per_s", "output_tokens_per_s"),
        ("Output_Tokens_Per_S", "output_tokens_per_s"),
        ("peak_memory", "peak_memory_bytes"),
        ("steps.decode.step_time.p50", "steps.decode.step_time_s.p50"),
    ],
)
def test_a_misspelt_objective_gets_the_name_that_was_meant(objective: str, meant: str) -> None:
    (fault,) = faults(sweep__objective=objective, **OFFLINE)

    assert fault == (
        f"sweep.objective={objective}: is no metric of a run that can be better or worse; names "
        "are those of metrics.json, such as output_tokens_per_s, ttft_s.p50, tpot_s.p99, and "
        f"goodput; did you mean {meant}?"
    )


def test_an_objective_like_nothing_that_is_known() -> None:
    (fault,) = faults(sweep__objective="zzz", **OFFLINE)

    assert "did you mean" not in fault


@pytest.mark.parametrize("objective", METRICS)
def test_every_known_metric_can_be_an_objective(objective: str) -> None:
    assert faults(sweep__objective=objective, sweep__slo=SloConfig(ttft_s=1.0), **OFFLINE) == []


@pytest.mark.parametrize("objective", ["goodput", "goodput_per_device", "slo_attainment"])
def test_goodput_needs_a_limit(objective: str) -> None:
    (fault,) = faults(sweep__objective=objective, **OFFLINE)

    assert fault == (
        f"sweep.objective={objective}: needs a limit that a good request must keep; set one or "
        "more of sweep.slo.ttft_s, sweep.slo.tpot_s, sweep.slo.e2e_s"
    )


def test_a_runner_of_ones_own_has_metrics_of_its_own() -> None:
    assert faults(sweep__objective="my_score", runner___target_="mine.Runner") == []


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("output_tokens_per_s", True),
        ("goodput", True),
        ("ttft_s.p99", False),
        ("peak_memory_bytes", False),
        ("num_preemptions", False),
        ("my_score", True),
        ("my_loss_s", False),
        ("my_tokens_per_s", True),
    ],
)
def test_which_way_a_metric_is_better(metric: str, expected: bool) -> None:
    assert is_higher_better(metric) is expected


def test_the_default_objective_follows_from_limits() -> None:
    assert objective_of(changed()) == "output_tokens_per_s"
    assert objective_of(changed(sweep__slo=SloConfig(e2e_s=3.0))) == "goodput"
    assert objective_of(changed(sweep__objective="ttft_s.p50")) == "ttft_s.p50"
    assert slo_limits(SloConfig(e2e_s=3.0)) == {"e2e_s": 3.0}


def test_names_are_those_that_runs_write_and_summaries_derive() -> None:
    from inferkit.bench.load.client import Outcome
    from inferkit.bench.load.metrics import collect_load_metrics
    from inferkit.offline.metrics import collect_metrics
    from inferkit.sweep.outcomes import flat_metrics

    offline = collect_metrics([], [], peak_memory_bytes=1, expert_load={0: [1, 2]})
    one = Outcome(request_id=0, num_prompt_tokens=1)
    load = collect_load_metrics(
        [one], has_rate=True, load_time_s=1.0, num_devices=1, client_cpu_s=0.1
    )
    derived = {"output_tokens_per_s_per_device", "goodput", "goodput_per_device", "slo_attainment"}
    assert set(METRICS) - set(flat_metrics(offline)) - set(flat_metrics(load)) == derived
