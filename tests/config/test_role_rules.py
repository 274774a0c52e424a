"""What goes with a role, and what a role takes for its automatic values."""

from dataclasses import replace
from typing import Any

import pytest

from inferkit.cli import run as run_command
from inferkit.config.check import Checker
from inferkit.config.resolve import resolve_automatic
from inferkit.config.role_rules import OFFLINE_RUNNER, ONLINE_RUNNER
from inferkit.config.rules import check_rules
from inferkit.config.schema import InferenceConfig, RunnerConfig
from inferkit.config.space import ConfigSpace
from tests.config.configs import changed


def in_role(role: str = "serve", **values: Any) -> InferenceConfig:
    return replace(changed(**values), role=role, runner=RunnerConfig(_target_=ONLINE_RUNNER))


def faults(cfg: InferenceConfig) -> list[str]:
    return [str(fault) for fault in check_rules(cfg).faults]


def test_a_role_composes_and_is_checked(space: ConfigSpace) -> None:
    checked = Checker(space).check_overrides(["+role=serve"])

    assert checked.faults == () and checked.warnings == ()
    cfg = checked.config
    assert cfg is not None
    assert (cfg.role, cfg.runner._target_) == ("serve", ONLINE_RUNNER)
    assert cfg.kv_cache.enable_prefix_cache
    assert (cfg.scheduler.max_new_tokens, cfg.disagg.http_port) == (0, 8000)
    assert cfg.engine.max_model_len == 0, "the embedded model's files tell it at the start"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"disagg__http_port": 9000, "disagg__zmq_port": 5560}, []),
        ({"disagg__http_host": "0.0.0.0", "disagg__http_port": 0}, []),
        ({"router__request_timeout_s": 5.0}, []),
        ({"scheduler__max_new_tokens": 0}, []),
        ({"engine__max_model_len": 8, "scheduler__max_new_tokens": 32}, []),
        (
            {"router__port": 9},
            ["router.port=9: has no effect in +role=serve"],
        ),
        (
            {"disagg__lease_s": 1.0},
            ["disagg.lease_s=1.0: has no effect in +role=serve"],
        ),
        (
            {"disagg__http_port": -1},
            ["disagg.http_port=-1: is out of range; allowed is 0 (a free one is chosen) to 65535"],
        ),
        (
            {"disagg__zmq_port": 65535},
            [
                "disagg.zmq_port=65535: is out of range; allowed is 0 (a free one is chosen) to "
                "65534"
            ],
        ),
        (
            {"router__request_timeout_s": 0.0},
            ["router.request_timeout_s=0.0: is out of range; allowed is > 0"],
        ),
        (
            {"scheduler__fixed_steps": True},
            [
                "scheduler.fixed_steps=true: is for the step timing of an offline run; requests "
                "of a role end by themselves"
            ],
        ),
        (
            {
                "parallel__node_ips": ["10.0.0.1", "10.0.0.2"],
                "parallel__world_size": 2,
                "parallel__devices_per_node": 1,
                "parallel__master_port": 29500,
            },
            ["parallel.node_ips=[10.0.0.1,10.0.0.2]: +role=serve runs on one node in this version"],
        ),
        (
            {"scheduler__max_new_tokens": -1},
            [
                "scheduler.max_new_tokens=-1: is out of range; allowed is >= 1, or in a role 0 "
                "(to the end of the context)"
            ],
        ),
    ],
)
def test_keys_of_the_role_serve(values: dict[str, Any], found: list[str]) -> None:
    assert faults(in_role(**values)) == found


def test_a_role_that_is_not_there_is_named() -> None:
    assert faults(in_role("decode")) == [
        "role=decode: is no role of this version; there is +role=serve"
    ]


def test_a_runner_goes_with_its_role() -> None:
    offline, online = (RunnerConfig(_target_=name) for name in (OFFLINE_RUNNER, ONLINE_RUNNER))
    assert faults(replace(in_role(), runner=offline)) == [
        "runner=offline: does not serve, which +role=serve asks for; leave the runner to the role"
    ]
    assert faults(replace(changed(), runner=online)) == [
        "runner=online: serves a role; choose one, such as +role=serve"
    ]
    own = RunnerConfig(_target_="mypackage.Runner")
    assert faults(replace(in_role(), runner=own)) == []


def test_prompts_of_an_offline_run_are_told_to_have_no_effect() -> None:
    warnings = check_rules(in_role(data__limit=3, data__input_truncated_len=9)).warnings
    assert [str(warning) for warning in warnings] == [
        "data.limit=3: has no effect in +role=serve: prompts come by HTTP",
        "data.input_truncated_len=9: has no effect in +role=serve: prompts come by HTTP",
    ]


def test_a_role_takes_the_context_of_its_model() -> None:
    cfg = in_role()
    assert resolve_automatic(cfg).engine.max_model_len == 0
    resolved = resolve_automatic(resolve_automatic(cfg), context_len=4096)
    assert resolved.engine.max_model_len == 4096
    assert resolved.scheduler.max_prefill_tokens == 2048
    assert resolve_automatic(resolved, context_len=99) == resolved
    given = in_role(engine__max_model_len=512)
    assert resolve_automatic(given, context_len=4096).engine.max_model_len == 512


def test_whole_prompts_of_a_role_may_be_as_long_as_the_context() -> None:
    cfg = in_role(scheduler__enable_chunked_prefill=False)
    assert resolve_automatic(cfg).scheduler.max_prefill_tokens == 0
    resolved = resolve_automatic(resolve_automatic(cfg), context_len=4096)
    assert resolved.scheduler.max_prefill_tokens == 4096


def test_without_a_role_the_context_of_the_model_means_nothing() -> None:
    assert resolve_automatic(changed(), context_len=4096) == resolve_automatic(changed())


@pytest.mark.parametrize("word", ["+role=serve", "+role=serve,serve"])
def test_a_sweep_over_a_role_is_refused_with_a_command_that_works(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", "-m", word, "scheduler.batch_size=1,2"]) == 2

    shown = capsys.readouterr().err
    assert "a role serves until it is stopped" in shown
    assert "check +role=serve scheduler.batch_size=1" in shown
