"""Rules of runner=load, and of the load node without it."""

from dataclasses import replace

import pytest

from inferkit.config.faults import Findings
from inferkit.config.load_rules import LOAD_RUNNER, check_load_lengths, load
from inferkit.config.schema import (
    EngineConfig,
    InferenceConfig,
    LoadConfig,
    RunnerConfig,
    SchedulerConfig,
)


def loading(role: str | None = "serve", **values: object) -> InferenceConfig:
    runner = RunnerConfig(_target_=LOAD_RUNNER)
    return InferenceConfig(role=role, runner=runner, load=LoadConfig(**values))


def findings_of(cfg: InferenceConfig) -> Findings:
    findings = Findings()
    load(cfg, cfg, findings)
    return findings


@pytest.mark.parametrize("role", ["serve", "cluster"])
def test_services_that_clients_talk_to_can_be_loaded(role):
    found = findings_of(loading(role, rate=2.0))
    assert found.faults == [] and found.warnings == []


@pytest.mark.parametrize(
    ("role", "fix"), [(None, "+role=serve"), ("prefill", "+role=cluster"), ("router", None)]
)
def test_a_run_without_such_a_service_is_refused_with_one_that_has_it(role, fix):
    (fault,) = findings_of(loading(role)).faults
    assert "+role=serve or +role=cluster" in fault.problem
    assert fault.fix.add == (fix or "+role=cluster",)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"num_requests": 0}, ">= 1"),
        ({"rate": 0.0}, "> 0, or null"),
        ({"rate": float("inf")}, "> 0, or null"),
        ({"concurrency": 0}, ">= 1"),
        ({"prompt_len": 0}, ">= 1"),
        ({"output_len": -1}, ">= 1"),
        ({"seed": -1}, ">= 0"),
    ],
)
def test_ranges(values, allowed):
    (fault,) = findings_of(loading(**values)).faults
    assert f"allowed is {allowed}" in fault.problem
    assert fault.fix is not None


def test_concurrency_with_a_rate_is_named():
    (warning,) = findings_of(loading(rate=1.0, concurrency=3)).warnings
    assert warning.key == "load.concurrency"


def test_the_load_of_a_run_without_one_is_named():
    cfg = InferenceConfig(role="serve", load=LoadConfig(rate=4.0, output_len=5))
    found = findings_of(cfg)
    assert found.faults == []
    assert [str(warning) for warning in found.warnings] == [
        "load.rate=4.0: has no effect without runner=load",
        "load.output_len=5: has no effect without runner=load",
    ]


def lengths(max_model_len: int, scheduler: SchedulerConfig | None = None, **values: int) -> list:
    cfg = replace(
        loading(**values),
        engine=EngineConfig(max_model_len=max_model_len),
        scheduler=scheduler or SchedulerConfig(),
    )
    findings = Findings()
    check_load_lengths(cfg, findings)
    return findings.faults


def test_requests_fit_the_context():
    assert lengths(192, prompt_len=128, output_len=64) == []
    assert lengths(0, prompt_len=128, output_len=64) == []
    (fault,) = lengths(100, prompt_len=128, output_len=64)
    assert "makes 192 tokens" in fault.problem and fault.fix.add == ("load.prompt_len=36",)
    (fault,) = lengths(50, prompt_len=128, output_len=64)
    assert fault.fix.add == ("load.prompt_len=1", "load.output_len=49")


def test_prompts_fit_a_step_without_chunked_prefill():
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_prefill_tokens=100)
    (fault,) = lengths(1000, scheduler, prompt_len=128, output_len=64)
    assert fault.fix.add == ("load.prompt_len=100",)
    chunked = replace(scheduler, enable_chunked_prefill=True)
    assert lengths(1000, chunked, prompt_len=128, output_len=64) == []


def test_a_wrong_value_is_told_also_where_the_node_is_not_read():
    cfg = InferenceConfig(role="cluster", load=LoadConfig(rate=-1.0))
    (fault,) = findings_of(cfg).faults
    assert fault.key == "load.rate" and "allowed is > 0, or null" in fault.problem
