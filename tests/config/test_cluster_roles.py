"""The roles of a cluster: their words, and what they must have in common."""

from collections.abc import Sequence
from typing import Any

import pytest

from inferkit.config.cluster_roles import (
    DECODE,
    EQUAL_KEYS,
    PREFILL,
    ROUTER,
    RoleCheck,
    Shares,
    merged_faults,
    own_words,
    pair_faults,
    port_faults,
    role_words,
    shares_of_host,
    unusable_words,
)
from inferkit.config.faults import Fault, Fix
from inferkit.config.resolve import CPU_PLATFORM
from inferkit.config.schema import InferenceConfig
from inferkit.core.transfer_messages import InstanceLayout, LayerLayout
from tests.config.configs import in_role

CLUSTER_WORDS = [
    "+experiment=big",
    "+role=cluster",
    "cluster.prefill=2",
    "parallel=tp2",
    "model.dtype=float32",
    "router.retries=2",
    "router.port=9000",
    "disagg.lease_s=5",
    "+runner.params.drain_limit_s=1",
    "hydra.run.dir=x",
    "hydra.verbose=true",
    "scheduler.max_new_tokens=7",
    "disagg.secret_env=SECRET",
]


def pair_faults_of(roles: dict[str, InferenceConfig]) -> list[Fault]:
    return list(pair_faults(roles, {}))


def cluster(**values: Any) -> InferenceConfig:
    return in_role("cluster", **{f"cluster__{name}": value for name, value in values.items()})


def configs(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> dict[str, InferenceConfig]:
    return {
        ROUTER: in_role(ROUTER),
        PREFILL: in_role(PREFILL, **prefill or {}),
        DECODE: in_role(DECODE, **decode or {}),
    }


def test_an_instance_gets_what_all_share_then_what_is_its_own() -> None:
    words = role_words(CLUSTER_WORDS, PREFILL, ["parallel=tp4", "kv_cache.block_size=16"])
    assert words == [
        "disagg.http_port=0",
        "disagg.bootstrap_port=0",
        "disagg.zmq_port=0",
        "+experiment=big",
        "+role=prefill",
        "parallel=tp4",
        "model.dtype=float32",
        "disagg.lease_s=5",
        "hydra.verbose=true",
        "scheduler.max_new_tokens=7",
        "disagg.secret_env=SECRET",
        "kv_cache.block_size=16",
    ]


def test_a_router_gets_what_it_reads() -> None:
    assert role_words(
        [*CLUSTER_WORDS, "engine.max_model_len=9", "engine.warm_up=false"], ROUTER
    ) == [
        "router.prefill_urls=[]",
        "router.decode_urls=[]",
        "+experiment=big",
        "+role=router",
        "model.dtype=float32",
        "router.retries=2",
        "router.port=9000",
        "hydra.verbose=true",
        "scheduler.max_new_tokens=7",
        "disagg.secret_env=SECRET",
        "engine.max_model_len=9",
    ]


def test_a_share_of_the_host_gives_way_to_what_is_typed() -> None:
    shares = Shares(device_memory=100, num_threads=3)
    assert role_words(["+role=cluster"], DECODE, shares=shares) == [
        "disagg.http_port=0",
        "disagg.zmq_port=0",
        "platform.device_memory=100",
        "platform.num_threads=3",
        "+role=decode",
    ]
    words = role_words(["+role=cluster", "platform.num_threads=1"], DECODE, shares=shares)
    assert "platform.num_threads=1" in words and "platform.num_threads=3" not in words
    assert not any(
        "platform" in word for word in role_words(["+role=cluster"], ROUTER, shares=shares)
    )


def test_words_of_a_role_are_split_as_a_shell_does() -> None:
    cfg = cluster(prefill_overrides="parallel=tp2 'model.arch={a: 1}'")
    assert own_words(cfg, PREFILL) == ["parallel=tp2", "model.arch={a: 1}"]
    assert own_words(cfg, DECODE) == own_words(cfg, ROUTER) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, []),
        ({"prefill": 0}, ["cluster.prefill=0: is out of range; allowed is >= 1"]),
        ({"decode": -1}, ["cluster.decode=-1: is out of range; allowed is >= 1"]),
        (
            {"prefill_overrides": "a='b"},
            ["cluster.prefill_overrides=a='b: cannot be read as words: No closing quotation"],
        ),
        (
            {"decode_overrides": "a.b=1 -m"},
            [
                "cluster.decode_overrides=a.b=1 -m: -m is no override; write KEY=VALUE, with "
                "spaces between several"
            ],
        ),
        (
            {"decode_overrides": "+role=prefill"},
            [
                "cluster.decode_overrides=+role=prefill: +role=prefill chooses a role, which is "
                "decode already"
            ],
        ),
        (
            {"decode_overrides": "router.port=1"},
            [
                "cluster.decode_overrides=router.port=1: router.port=1 belongs to the cluster, not "
                "to decode; write it on the command line itself"
            ],
        ),
    ],
)
def test_the_cluster_s_own_node(values: dict[str, Any], found: list[str]) -> None:
    assert [str(fault) for fault in unusable_words(cluster(**values))] == found


def test_equal_roles_fit() -> None:
    assert pair_faults_of(configs()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache.block_size", 16),
        ("model.name", "other"),
        ("model.path", "org/other"),
        ("disagg.verify_digest", True),
        ("disagg.lease_s", 1.0),
        ("engine.max_model_len", 100),
    ],
)
def test_what_prefill_and_decode_must_have_in_common(key: str, value: Any) -> None:
    faults = pair_faults_of(configs(decode={key.replace(".", "__"): value}))
    assert [fault.key for fault in faults] == [key]
    assert str(faults[0]).startswith(f"{key}: prefill ")
    assert "prefill and decode hand KV over, so they must have the same" in str(faults[0])


def test_all_differences_are_told_at_once() -> None:
    values = {"kv_cache__block_size": 16, "model__dtype": "float16", "disagg__verify_digest": True}
    keys = [fault.key for fault in pair_faults_of(configs(decode=values))]
    assert keys == ["model.dtype", "kv_cache.block_size", "disagg.verify_digest"]


def test_sizes_and_timers_of_one_side_may_differ() -> None:
    values = {
        "parallel__world_size": 2,
        "parallel__attn_tp_size": 2,
        "scheduler__batch_size": 4,
        "kv_cache__num_blocks": 100,
        "disagg__stash_s": 1.0,
    }
    assert pair_faults_of(configs(decode=values)) == []


def test_the_seed_matters_where_weights_are_random() -> None:
    seed = {"data__seed": 3}
    assert pair_faults_of(configs(decode=seed)) == []
    both = {"model__with_ckpt": False}
    (fault,) = pair_faults_of(configs(prefill=both, decode=both | seed))
    assert fault.key == "data.seed"


def test_a_difference_is_cured_by_taking_the_words_of_both_roles_away() -> None:
    own = {PREFILL: ["kv_cache.block_size=16", "a=1"], DECODE: ["kv_cache=paged"], ROUTER: []}
    (fault,) = pair_faults(configs(decode={"kv_cache__block_size": 16}), own)
    assert fault.fix == Fix(
        add=('cluster.prefill_overrides="a=1"',), drop=("cluster.decode_overrides",)
    )


def test_the_router_has_the_model_of_its_instances() -> None:
    both = {"model__path": "org/other"}
    (fault,) = pair_faults_of(configs(prefill=both, decode=both))
    assert str(fault).startswith("model.path: router null, instances org/other: the router tokenis")


def test_every_field_of_a_layout_is_decided_by_a_key_or_by_the_model() -> None:
    of_model = {"kind", "manager_key", "num_kv_heads", "dims", "window", "layer_idx"}
    may_differ = {"attn_tp_size", "attn_dp_size", "cp_size", "layers", "mtp_layers"}
    fields = {*InstanceLayout.__struct_fields__, *LayerLayout.__struct_fields__}
    assert fields - of_model - may_differ == EQUAL_KEYS.keys() - {"timers", "limits"}


def test_fixed_ports_of_instances_are_told() -> None:
    free = {"disagg__http_port": 0, "disagg__bootstrap_port": 0, "disagg__zmq_port": 0}
    assert list(port_faults(cluster(), configs(free, free), {})) == []
    fixed = free | {"disagg__http_port": 8000}
    assert [str(fault) for fault in port_faults(cluster(), configs(fixed, fixed), {})] == [
        f"{role}: disagg.http_port=8000: is router.port of router too; leave it out (a free one is "
        "chosen)"
        for role in (PREFILL, DECODE)
    ]
    fixed = free | {"disagg__zmq_port": 5600}
    assert [str(fault) for fault in port_faults(cluster(prefill=2), configs(fixed, free), {})] == [
        "prefill: disagg.zmq_port=5600: is one port for 2 instances; leave it out (a free one is "
        "chosen)"
    ]


def test_all_ranks_share_a_cpu() -> None:
    on_cpu = {"platform___target_": CPU_PLATFORM}
    roles = configs(on_cpu | {"parallel__world_size": 2}, on_cpu)
    shares = shares_of_host(cluster(prefill=2), roles, memory=1000, num_cores=10)
    assert shares == Shares(device_memory=200, num_threads=2)
    few = shares_of_host(cluster(prefill=2), roles, memory=None, num_cores=2)
    assert few == Shares(device_memory=0, num_threads=1)
    typed = configs(on_cpu | {"platform__device_memory": 100}, on_cpu)
    assert shares_of_host(cluster(), typed, memory=1000, num_cores=8).device_memory == 0
    too_much = configs(on_cpu | {"platform__device_memory": 900}, on_cpu)
    assert shares_of_host(cluster(), too_much, memory=1000, num_cores=8).device_memory == 500


def test_devices_have_their_own_memory() -> None:
    on_device = {"platform___target_": "inferkit.platforms.npu.NpuPlatform"}
    roles = configs(on_device, on_device)
    assert shares_of_host(cluster(), roles, memory=1000, num_cores=8) == Shares()


def check(role: str, faults: Sequence[Fault], own: Sequence[str] = ()) -> RoleCheck:
    return RoleCheck(role=role, words=[], own=own, faults=faults, config=in_role(role))


def test_a_fault_of_several_roles_is_told_once() -> None:
    fault = Fault(key="model", problem="is too big", fix=Fix(add=("model=small",)))
    (merged,) = merged_faults([check(PREFILL, [fault]), check(DECODE, [fault])], [])
    assert str(merged) == "prefill, decode: model: is too big"
    assert merged.fix == fault.fix
    assert merged_faults([check(PREFILL, [fault])], [fault]) == []


def test_a_fault_in_words_of_one_role_is_cured_there() -> None:
    faults = [
        Fault(key="a.b", given="a.b=1", problem="is wrong", fix=Fix(add=("a.b=2",))),
        Fault(key="c", given="c=x", problem="is wrong too", fix=Fix(drop=("c",))),
    ]
    own = ["d=e f", "a.b=1", "c=x"]
    merged = merged_faults([check(PREFILL, faults, own)], [])
    cured = Fix(add=("cluster.prefill_overrides=\"'d=e f' a.b=2\"",))
    assert [fault.fix for fault in merged] == [cured, cured]
    assert [str(fault) for fault in merged] == [
        "prefill: a.b=1: is wrong",
        "prefill: c=x: is wrong too",
    ]


def test_a_fault_without_a_cure_leaves_the_words_of_its_role_alone() -> None:
    faults = [
        Fault(key="a", problem="is wrong", fix=Fix(add=("a=2",))),
        Fault(key="b", problem="cannot be cured"),
    ]
    merged = merged_faults([check(DECODE, faults, ["a=1", "b=1"])], [])
    assert [fault.fix for fault in merged] == [None, None]
