"""Every kind of faulty override: what is said, and that nothing else is disturbed."""

from pathlib import Path

import pytest

from inferkit.config.faults import Fault
from inferkit.config.overrides import compose_checked
from inferkit.config.space import ConfigSpace


def fault_of(space: ConfigSpace, text: str) -> Fault:
    (fault,) = compose_checked(space, [text]).faults
    return fault


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # unknown keys, with and without '+'
        ("scheduler.bath_size=3", "there is no such key; did you mean scheduler.batch_size?"),
        ("+scheduler.bath_size=3", "there is no such key; did you mean scheduler.batch_size?"),
        ("++scheduler.bath_size=3", "there is no such key; did you mean scheduler.batch_size?"),
        ("batch_size=3", "there is no such key; did you mean scheduler.batch_size?"),
        ("seed=3", "there is no such key; did you mean data.seed or load.seed?"),
        ("paralel=tp1", "there is no such key; did you mean parallel=tp1?"),
        ("rol=serve", "there is no such key; did you mean +role=serve?"),
        ("parallel.tp_size=4", "there is no such key; did you mean parallel=tp4?"),
        ("gpu_memory_utilization=0.9", "did you mean kv_cache.mem_fraction=0.9?"),
        ("pipeline_parallel_size=2", "there is no such key: there is no pipeline parallelism"),
        ("parallel.moe_ep_size=2", "it is derived, parallel.world_size / parallel.moe_tp_size"),
        ("+model.params.x=1", "there is no such key\nkeys of model:"),
        ("scheduler.num_reserved_decode_tokens=1", "only the scheduler of +role=decode has this"),
        ("hydra.runn.dir=x", "there is no such key; did you mean hydra.run.dir?"),
        (
            "++data={topp:0.3}",
            "data.topp: there is no such key; did you mean data.top_p?",
        ),
        # groups
        (
            "exe_mode=eagr",
            "there is no such option; did you mean exe_mode=eager?\noptions of exe_mode: eager",
        ),
        ("engine=1", "there is no such option\noptions of engine: default"),
        (
            "+parallel=tp1",
            "parallel has a default already, which an option replaces without '+'",
        ),
        (
            "++parallel=tp1",
            "parallel has a default already, which an option replaces without '+'",
        ),
        ("model@other=llama", "a group goes to its own place; write model=llama"),
        ("role=serve", "role has no default, so its options are added with one '+'"),
        (
            "+role=training",
            "there is no such option\noptions of role: cluster, decode, prefill, router, serve",
        ),
        # types
        ("scheduler.batch_size=abc", "must be an integer"),
        (
            "scheduler.batch_size=8.0",
            "must be an integer; allowed is 0 (automatic) or >= 1; "
            "did you mean scheduler.batch_size=8?",
        ),
        ("model.with_ckpt=maybe", "must be true or false"),
        ("load.rate=fast", "must be a number or null"),
        (
            "model.dtype=fp16",
            "must be one of float32, bfloat16, float16; did you mean model.dtype=float16?",
        ),
        (
            "data.dataset=longbench",
            "must be one of default, LongBench, InfiniteBench, jsonl; "
            "did you mean data.dataset=LongBench?",
        ),
        (
            "parallel.node_ips=a",
            "must be a list such as '[a,b]'; did you mean 'parallel.node_ips=[a]'?",
        ),
        ("parallel.node_ips=a,b", "is a list, which is written 'parallel.node_ips=[a,b]'"),
        (
            "platform.device_memory=1.5GiB",
            "must be an integer; allowed is 0 (ask the device) or a number of bytes; "
            "did you mean platform.device_memory=1610612736?",
        ),
        # free-form dictionaries
        (
            "scheduler.params.window=4",
            "a new entry of a free-form dictionary is added with '+'",
        ),
        ("model.arch={a:1}", "a new entry of a free-form dictionary is added with '+'"),
        # signs
        ("+scheduler.batch_size=3", "the key has a value already, which is replaced without '+'"),
        (
            "~scheduler.batch_size",
            "a key always has a value; leave this out, and it is the default",
        ),
        # grammar
        ("scheduler.batch_size", "has no value; write scheduler.batch_size=VALUE"),
        ("=3", "no key before the '='; write KEY=VALUE"),
        ("model.path=~/x", "the value needs quotes of its own: \"model.path='~/x'\""),
        (
            "model.path=http://h/p?a=1",
            "the value needs quotes of its own: \"model.path='http://h/p?a=1'\"",
        ),
        ("scheduler.batch_size=1,2", "several values need -m (one run per value)"),
        (
            "model.name=a,b",
            "several values need -m (one run per value); a text with commas is written "
            "\"model.name='a,b'\"",
        ),
        (
            "parallel=tp1,tp2",
            "a run has one option of parallel; several need -m (one run per option)",
        ),
        ("parallel.node_ips=[a", "lacks a closing bracket; write 'parallel.node_ips=[a]'"),
        ("data.limit = 3", "has spaces around the '='; write data.limit=3"),
        ("data.limit=3,", "ends in a comma; several values are one word without spaces"),
        ("data.limit=1 data.seed=2", "holds 2 options in one word; write them apart: data.limit=1"),
        ("data.limit=1(2", "cannot be read; it must be an integer or null"),
        (
            "router.prefill_urls=[http://a/?x=1]",
            "its items need quotes of their own: \"router.prefill_urls=['http://a/?x=1']\"",
        ),
        ("", "is an empty word; leave it out"),
    ],
)
def test_problem_of_one_override(space: ConfigSpace, text: str, problem: str) -> None:
    fault = fault_of(space, text)

    assert problem in fault.problem
    assert "@_global_" not in str(fault)
    assert text in (fault.given, fault.key)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("scheduler.colour=3", "keys of scheduler: _target_, params, batch_size"),
        ("xyz=1", "keys of the configuration: role, allowed_targets, data"),
        ("hydra.xyz=1", "keys of hydra: defaults, mode"),
    ],
)
def test_without_a_near_key_the_keys_there_are_listed(
    space: ConfigSpace, text: str, keys: str
) -> None:
    assert keys in fault_of(space, text).problem


def test_all_faults_are_found_in_the_order_of_the_command_line(space: ConfigSpace) -> None:
    texts = ["data.top=1", "parallel=tp9", "role=x", "scheduler.batch_size=a", "model.path=~"]

    composition = compose_checked(space, texts)

    assert [fault.key for fault in composition.faults] == [
        "data.top",
        "parallel",
        "role",
        "scheduler.batch_size",
        "model.path",
    ]


def test_right_overrides_are_applied_beside_faulty_ones(space: ConfigSpace) -> None:
    composition = compose_checked(space, ["scheduler.bath_size=3", "data.limit=4", "platform=cpu"])

    assert composition.cfg.data.limit == 4
    assert composition.cfg.platform._target_ == "inferkit.platforms.cpu.CpuPlatform"
    assert composition.cfg.scheduler.batch_size == 0


@pytest.mark.parametrize(
    "text",
    [
        "+scheduler.params={window:4}",
        "+engine.params.nested.key=1",
        "++scheduler.batch_size=3",
        "model.path=Qwen/Qwen2.5-0.5B",
        "parallel.node_ips=[10.0.0.1,10.0.0.2]",
        "hydra.verbose=true",
        "hydra.run.dir=/tmp/x",
        "data.limit=null",
        "model.path='~/x'",
    ],
)
def test_right_override_has_no_fault(space: ConfigSpace, text: str) -> None:
    assert compose_checked(space, [text]).faults == ()


def test_what_is_composed_is_not_changed_by_a_check(space: ConfigSpace) -> None:
    compose_checked(space, ["hydra.run.dir=/tmp/x", "data.limit=9"])

    assert space.compose().data.limit is None
    assert "outputs" in str(space.compose().hydra.run)


@pytest.fixture
def appended(tmp_path: Path) -> ConfigSpace:
    """A space with a group that has no default."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "long.yaml").write_text("# @package _global_\ndata:\n  input_truncated_len: 1024\n")
    (folder / "wrong.yaml").write_text("# @package _global_\ndata:\n  inputlen: 1024\n")
    (folder / "on_cpu.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /platform: cpu\n  - _self_\n"
        "scheduler:\n  batch_size: 5\n"
    )
    return ConfigSpace(config_dir=tmp_path)


def test_an_appended_group_needs_one_plus(appended: ConfigSpace) -> None:
    assert compose_checked(appended, ["+experiment=long"]).faults == ()
    for text in ("experiment=long", "++experiment=long"):
        fault = fault_of(appended, text)
        assert fault.problem == "experiment has no default, so its options are added with one '+'"
        assert fault.fix is not None
        assert fault.fix.add == ("+experiment=long",)


def test_a_key_beats_an_appended_group_wherever_it_stands(appended: ConfigSpace) -> None:
    for texts in (
        ["data.input_truncated_len=7", "+experiment=long"],
        ["+experiment=long", "data.input_truncated_len=7"],
    ):
        assert compose_checked(appended, texts).cfg.data.input_truncated_len == 7


def test_an_option_file_that_does_not_compose_is_named(appended: ConfigSpace) -> None:
    composition = compose_checked(appended, ["platform=cpu", "+experiment=wrong"])

    (fault,) = composition.faults
    assert fault.given == "+experiment=wrong"
    assert "inputlen" in fault.problem
    assert composition.cfg.platform._target_ == "inferkit.platforms.cpu.CpuPlatform"


@pytest.mark.parametrize(
    ("texts", "platform", "batch_size"),
    [
        ([], "auto", 0),
        (["+experiment=on_cpu"], "inferkit.platforms.cpu.CpuPlatform", 5),
        (["+experiment=on_cpu", "platform=auto"], "auto", 5),
        (["platform=auto", "+experiment=on_cpu"], "auto", 5),
        (["scheduler.batch_size=7", "+experiment=on_cpu"], "inferkit.platforms.cpu.CpuPlatform", 7),
    ],
)
def test_who_wins(appended: ConfigSpace, texts: list[str], platform: str, batch_size: int) -> None:
    """Base < appended file < group on the command line < key on the command line."""
    composition = compose_checked(appended, texts)

    assert composition.faults == ()
    assert composition.cfg.platform._target_ == platform
    assert composition.cfg.scheduler.batch_size == batch_size
