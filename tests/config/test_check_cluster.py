"""A cluster on the command line: every role is composed and checked before anything starts."""

from typing import Any

import pytest

from inferkit.config.check import Checked, Checker
from inferkit.config.check_cluster import ClusterPlan
from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace


def check(space: ConfigSpace, *words: str) -> Checked:
    return Checker(space).check_overrides(["+role=cluster", *words])


def texts(space: ConfigSpace, *words: str) -> list[str]:
    return [str(fault) for fault in check(space, *words).faults]


def plan(space: ConfigSpace, *words: str) -> ClusterPlan:
    checked = check(space, *words)
    assert checked.config is not None, checked.faults
    return Checker(space).plan(["+role=cluster", *words], checked.config)


def test_a_cluster_composes(space: ConfigSpace) -> None:
    checked = check(space)
    assert checked.faults == () and checked.warnings == ()
    cfg = checked.config
    assert cfg is not None
    assert (cfg.role, cfg.cluster.prefill, cfg.cluster.decode) == ("cluster", 1, 1)


def test_roles_have_words_of_their_own(space: ConfigSpace) -> None:
    words = (
        "scheduler.batch_size=4",
        "parallel=tp2",
        "platform.device_memory=2000000000",
        'cluster.prefill_overrides="parallel=cp2 kv_cache.enable_prefix_cache=false"',
        "cluster.decode_overrides='scheduler.num_reserved_decode_tokens=8'",
    )
    found = plan(space, *words)

    prefill, decode = found.configs["prefill"], found.configs["decode"]
    assert (prefill.parallel.cp_size, decode.parallel.cp_size) == (2, 1)
    assert (prefill.parallel.attn_tp_size, decode.parallel.attn_tp_size) == (1, 2)
    assert prefill.scheduler.batch_size == decode.scheduler.batch_size == 4
    assert vars(decode.scheduler)["num_reserved_decode_tokens"] == 8
    assert found.configs["router"].parallel.world_size == 1
    assert "parallel=cp2" in found.words["prefill"]
    assert "parallel=tp2" in found.words["decode"]


def test_ranks_share_the_memory_of_this_host(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferkit.config.check_cluster.available_memory", lambda: 8 << 30)
    found = plan(space, "cluster.prefill=3", "cluster.prefill_overrides='scheduler.batch_size=2'")
    for role in ("prefill", "decode"):
        assert f"platform.device_memory={(8 << 30) // 4}" in found.words[role]
    assert not any(word.startswith("platform") for word in found.words["router"])


SHAPE = (
    "model=llama",
    "model.with_ckpt=false",
    "model.dtype=float32",
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}",
)


def test_a_model_that_does_not_fit_so_many_instances_is_refused(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("check_cluster", "memory"):
        monkeypatch.setattr(f"inferkit.config.{module}.available_memory", lambda: 4 << 20)
    words = (*SHAPE, "data.seed=1", "engine.max_model_len=512", "kv_cache.block_size=16")
    assert texts(space, *words) == []
    (fault,) = texts(space, *words, "cluster.prefill=7")
    assert fault.startswith("prefill, decode: ")
    assert "available" in fault


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            ["cluster.decode_overrides='kv_cache.block_size=16'", "cluster.prefill=0"],
            [
                "cluster.prefill=0: is out of range; allowed is >= 1",
                "kv_cache.block_size: prefill 128, decode 16: prefill and decode hand KV over, so "
                "they must have the same; set it for both, outside cluster.prefill_overrides and "
                "cluster.decode_overrides",
            ],
        ),
        (
            ["scheduler.bath_size=3"],
            ["scheduler.bath_size=3: there is no such key; did you mean scheduler.batch_size?"],
        ),
        (
            ["cluster.decode_overrides='parallel=cp2'"],
            [
                "decode: parallel.cp_size=2: is for prefill alone: ranks of a decode role share no "
                "prompt's tokens"
            ],
        ),
        (
            ["router.prefill_urls=[]", "disagg.http_port=9"],
            [
                "disagg.http_port=9: has no effect in +role=cluster",
                "router.prefill_urls=[]: has no effect in +role=cluster",
            ],
        ),
        (
            ["disagg.secret_env=INFERKIT_NO_SUCH_SECRET"],
            [
                "disagg.secret_env=INFERKIT_NO_SUCH_SECRET: the environment variable "
                "INFERKIT_NO_SUCH_SECRET is not set here, or empty; it holds the secret that signs "
                "control messages, the same on every node"
            ],
        ),
    ],
)
def test_faults_are_told_once_and_by_role(
    space: ConfigSpace, words: list[str], found: list[str]
) -> None:
    assert texts(space, *words) == found


def test_a_cure_for_the_words_of_one_role(space: ConfigSpace) -> None:
    own = 'cluster.prefill_overrides="kv_cache.num_blocks=40 scheduler.bath_size=4"'
    verdict = preflight(Command(overrides=("+role=cluster", own)), space)
    assert "prefill: scheduler.bath_size=4" in verdict.message
    assert "kv_cache.num_blocks=40 scheduler.batch_size=4" in verdict.message.split("this works")[1]


def test_a_cure_for_roles_that_do_not_fit(space: ConfigSpace) -> None:
    own = (
        'cluster.prefill_overrides="model.dtype=float32 kv_cache.block_size=16"',
        "cluster.decode_overrides='kv_cache.block_size=32'",
    )
    verdict = preflight(Command(overrides=("+role=cluster", *own)), space)
    assert "model.dtype: prefill float32, decode bfloat16" in verdict.message
    assert "kv_cache.block_size: prefill 16, decode 32" in verdict.message
    assert "this works" in verdict.message


def test_an_engine_of_the_whole_cluster(space: ConfigSpace) -> None:
    target = "inferkit.kv_transfer.engines.tcp.TcpEngine"
    words = (f"disagg.transfer._target_={target}", "+disagg.transfer.params.num_connections=2")
    configs = plan(space, *words).configs
    for role in ("prefill", "decode"):
        assert configs[role].disagg.transfer._target_ == target
        assert configs[role].disagg.transfer.params == {"num_connections": 2}
    (fault,) = texts(space, words[0], "+disagg.transfer.params.colour=red")
    assert fault.startswith("prefill, decode: disagg.transfer.params.colour=red: is no argument of")


def test_unread_options_of_the_router_are_no_warning(space: ConfigSpace) -> None:
    checked = check(space, "kv_cache.num_blocks=64", "data.limit=1")
    assert [str(warning) for warning in checked.warnings] == [
        "data.limit=1: has no effect in +role=cluster: prompts come by HTTP"
    ]


def test_every_role_of_a_plan_passes_alone(space: ConfigSpace) -> None:
    found = plan(space, "router.retries=2", "disagg.verify_digest=true")
    outcome: dict[str, Any] = {
        role: Checker(space).check_overrides(words).faults for role, words in found.words.items()
    }
    assert outcome == {"router": (), "prefill": (), "decode": ()}
    assert found.configs["router"].router.retries == 2
    assert found.configs["decode"].disagg.verify_digest
