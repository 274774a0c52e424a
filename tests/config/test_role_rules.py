"""What goes with a role, and what a role takes for its automatic values."""

from dataclasses import replace
from typing import Any

import pytest

from inferkit.cli import run as run_command
from inferkit.config.check import Checker
from inferkit.config.resolve import resolve_automatic
from inferkit.config.role_rules import (
    DECODE_SCHEDULER,
    OFFLINE_RUNNER,
    ONLINE_RUNNER,
    PREFILL_SCHEDULER,
    ROLES,
    ROUTER_RUNNER,
    SCHEDULER,
)
from inferkit.config.rules import check_rules
from inferkit.config.schema import (
    DecodeSchedulerConfig,
    DisaggMode,
    RunnerConfig,
    SchedulerConfig,
)
from inferkit.config.space import ConfigSpace
from tests.config.configs import changed, faults_of, in_role


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
    ("role", "http_port", "zmq_port", "prefix_cache"),
    [("prefill", 8001, 5555, True), ("decode", 8100, 5557, False)],
)
def test_instances_of_a_hand_off_compose(
    space: ConfigSpace, role: str, http_port: int, zmq_port: int, prefix_cache: bool
) -> None:
    checked = Checker(space).check_overrides([f"+role={role}"])

    assert checked.faults == () and checked.warnings == ()
    cfg = checked.config
    assert cfg is not None
    assert (cfg.role, cfg.disagg.mode.name) == (role, role)
    assert cfg.runner._target_ == ONLINE_RUNNER
    assert cfg.scheduler._target_ == ROLES[role].scheduler
    assert (cfg.disagg.http_port, cfg.disagg.zmq_port) == (http_port, zmq_port)
    assert cfg.disagg.bootstrap_port == 18800
    assert cfg.kv_cache.enable_prefix_cache is prefix_cache
    assert cfg.scheduler.max_new_tokens == 0
    assert isinstance(cfg.scheduler, DecodeSchedulerConfig) is (role == "decode")


def test_a_router_composes(space: ConfigSpace) -> None:
    checked = Checker(space).check_overrides(["+role=router", "+experiment=qwen3_8b_tp2"])

    assert [str(fault) for fault in checked.faults] == [
        "model.path: has no value; set model.path=... (a Hugging Face folder or id, or a .gguf "
        "file), or model.with_ckpt=false for random weights of the shape in model.arch"
    ]
    checked = Checker(space).check_overrides(["+role=router", "parallel=tp2"])
    assert checked.faults == ()
    assert checked.config is not None
    assert (checked.config.router.host, checked.config.router.port) == ("127.0.0.1", 8000)
    assert [str(warning) for warning in checked.warnings] == [
        "parallel.*: has no effect in +role=router: its instances have their own"
    ]


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
    assert faults_of(in_role(**values)) == found


def test_a_role_that_is_not_there_is_named() -> None:
    assert faults_of(replace(changed(), role="encode")) == [
        "role=encode: is no role of this version; there is +role=serve, +role=prefill, "
        "+role=decode, +role=router, +role=cluster"
    ]


@pytest.mark.parametrize("role", list(ROLES))
def test_a_role_with_its_own_parts_has_no_fault(role: str) -> None:
    assert faults_of(in_role(role)) == []


def test_a_runner_goes_with_its_role() -> None:
    offline, online, router = (
        RunnerConfig(_target_=name) for name in (OFFLINE_RUNNER, ONLINE_RUNNER, ROUTER_RUNNER)
    )
    assert faults_of(replace(in_role(), runner=offline)) == [
        "runner=offline: does not serve, which +role=serve asks for; leave the runner to the role"
    ]
    assert faults_of(replace(changed(), runner=online)) == [
        "runner=online: serves a role; choose one, such as +role=serve"
    ]
    assert faults_of(replace(changed(), runner=router)) == [
        "runner=router: serves a role; choose one, such as +role=router"
    ]
    assert faults_of(replace(in_role("decode"), runner=router)) == [
        "runner=router: is not what +role=decode runs; leave the runner to the role"
    ]
    own = RunnerConfig(_target_="mypackage.Runner")
    assert faults_of(replace(in_role("decode"), runner=own)) == []


@pytest.mark.parametrize(
    ("role", "scheduler", "problem"),
    [
        ("prefill", DECODE_SCHEDULER, "decode: is for +role=decode, and this is +role=prefill; "),
        ("decode", PREFILL_SCHEDULER, "prefill: is for +role=prefill, and this is +role=decode; "),
        ("decode", SCHEDULER, "default: hands no KV over, as +role=decode must; "),
        ("serve", DECODE_SCHEDULER, "decode: is for +role=decode, and this is +role=serve; "),
        (None, PREFILL_SCHEDULER, "prefill: is for +role=prefill, which chooses it by itself; "),
    ],
)
def test_a_scheduler_goes_with_its_role(role: str | None, scheduler: str, problem: str) -> None:
    cfg = replace(
        in_role(role) if role else changed(), scheduler=SchedulerConfig(_target_=scheduler)
    )
    (fault,) = faults_of(cfg)
    assert fault.startswith(f"scheduler={problem}")
    own = replace(cfg, scheduler=SchedulerConfig(_target_="mypackage.Scheduler"))
    assert faults_of(own) == []


def test_a_mode_goes_with_its_role() -> None:
    prefill = in_role("prefill")
    decoding = replace(prefill, disagg=replace(prefill.disagg, mode=DisaggMode.decode))
    assert faults_of(decoding) == [
        "disagg.mode=decode: contradicts +role=prefill, which has disagg.mode=prefill; leave it "
        "to the role"
    ]
    assert faults_of(changed(disagg__mode=DisaggMode.decode)) == [
        "disagg.mode=decode: is a part of a role; choose +role=decode"
    ]


@pytest.mark.parametrize(
    ("role", "values", "found"),
    [
        ("decode", {"router__policy": "least_loaded"}, "router.policy=least_loaded: has no"),
        ("prefill", {"cluster__decode": 2}, "cluster.decode=2: has no effect in +role=prefill"),
        ("router", {"disagg__http_port": 9}, "disagg.http_port=9: has no effect in +role=router"),
        ("cluster", {"disagg__zmq_port": 9}, "disagg.zmq_port=9: has no effect in +role=cluster"),
        (
            "cluster",
            {"router__decode_urls": []},
            "router.decode_urls=[]: has no effect in +role=cluster",
        ),
        (
            "decode",
            {"parallel__cp_size": 2, "parallel__world_size": 2},
            "parallel.cp_size=2: is for prefill alone: ranks of a decode role share no prompt's",
        ),
        (
            "prefill",
            {
                "parallel__cp_size": 2,
                "parallel__world_size": 4,
                "parallel__attn_tp_size": 2,
            },
            "parallel.cp_size=2: ",
        ),
    ],
)
def test_keys_that_do_not_go_with_a_role(role: str, values: dict[str, Any], found: str) -> None:
    texts = faults_of(in_role(role, **values))
    assert texts and texts[0].startswith(found)


def test_a_router_tells_that_its_instances_have_their_own_split() -> None:
    cfg = in_role("router", parallel__world_size=32, parallel__devices_per_node=16)
    assert [str(warning) for warning in check_rules(cfg).warnings] == [
        "parallel.world_size, parallel.devices_per_node: has no effect in +role=router: its "
        "instances have their own"
    ]
    assert faults_of(cfg) == []


def test_prompts_of_an_offline_run_are_told_to_have_no_effect() -> None:
    warnings = check_rules(in_role(data__limit=3, data__input_truncated_len=9)).warnings
    assert [str(warning) for warning in warnings] == [
        "data.input_truncated_len=9: has no effect in +role=serve: prompts come by HTTP",
        "data.limit=3: has no effect in +role=serve: prompts come by HTTP",
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


@pytest.mark.parametrize("word", ["+role=prefill", "+role=prefill,router"])
def test_a_sweep_over_a_role_is_refused_with_a_command_that_works(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", "-m", word, "scheduler.batch_size=1,2"]) == 2

    shown = capsys.readouterr().err
    assert "a role serves until it is stopped" in shown
    assert "check +role=prefill scheduler.batch_size=1" in shown
