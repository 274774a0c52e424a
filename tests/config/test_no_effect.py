"""Options that nothing reads: every key of the schema, in every role."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.faults import Command, Findings
from inferkit.config.no_effect import (
    ALL,
    READERS,
    REASONS,
    UNREAD,
    Use,
    changed_keys,
    no_effect_of_model,
    readers,
)
from inferkit.config.preflight import preflight
from inferkit.config.resolve import resolve_automatic
from inferkit.config.role_rules import ROLES, leaves
from inferkit.config.rules import check_rules
from inferkit.config.schema import (
    DecodeSchedulerConfig,
    ExeModeConfig,
    InferenceConfig,
    PlatformConfig,
)
from inferkit.config.space import ConfigSpace
from tests.config.configs import changed, in_role

KEYS = {key for key, _ in leaves("", InferenceConfig(scheduler=DecodeSchedulerConfig()))}
TINY = (
    "model=llama",
    "model.with_ckpt=false",
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}",
)

GRAPH = ExeModeConfig(_target_="x", name="graph", enable_static_kernel=True)


def told(cfg: InferenceConfig) -> list[str]:
    findings = check_rules(cfg)
    return [str(fault) for fault in (*findings.faults, *findings.warnings)]


def test_the_tables_name_keys_and_nodes_of_the_schema() -> None:
    nodes = {key.rpartition(".")[0] for key in KEYS} | {key.partition(".")[0] for key in KEYS}
    assert READERS.keys() <= KEYS | nodes
    assert REASONS.keys() <= KEYS | nodes
    assert {key for entry in UNREAD for key in entry.keys} <= KEYS


def test_who_reads_a_key_is_decided_for_every_key() -> None:
    assert {
        key for key in KEYS if key.partition(".")[0] not in READERS and key not in READERS
    } == set()
    assert {"offline", *ROLES} == ALL


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("data.limit", {"offline"}),
        ("data.temperature", ALL),
        ("model.dtype", ALL - {"router"}),
        ("model.path", ALL),
        ("disagg.bootstrap_port", {"prefill", "decode"}),
        ("disagg.lease_s", {"prefill", "decode", "cluster"}),
        ("disagg.stash_s", {"prefill", "cluster"}),
        ("disagg.fence_timeout_s", {"decode", "cluster"}),
        ("disagg.transfer.num_threads", {"prefill", "decode", "cluster"}),
        ("router.policy", {"router", "cluster"}),
        ("router.request_timeout_s", ALL - {"offline"}),
        ("cluster.prefill", {"cluster"}),
    ],
)
def test_readers_of_a_key(key: str, expected: set[str]) -> None:
    assert readers(key) == expected


@pytest.mark.parametrize("role", [None, *ROLES])
def test_what_a_role_sets_itself_is_read(space: ConfigSpace, role: str | None) -> None:
    words = [*TINY, *([f"+role={role}"] if role else [])]

    assert Checker(space).check_overrides(words).warnings == ()


@pytest.mark.parametrize(
    ("cfg", "found"),
    [
        (in_role("serve", disagg__lease_s=1.0), "disagg.lease_s=1.0: has no effect in +role=serve"),
        (in_role("serve", router__port=9), "router.port=9: has no effect in +role=serve"),
        (changed(disagg__stash_s=1.0), "disagg.stash_s=1.0: has no effect without a role"),
        (
            in_role("serve", kv_cache__host_bytes=9),
            "kv_cache.host_bytes=9: has no effect in +role=serve: only a decode role keeps "
            "retracted requests in host memory",
        ),
        (
            changed(exe_mode__enable_static_kernel=True),
            "exe_mode.enable_static_kernel=true: has no effect in eager mode, which compiles no "
            "graph",
        ),
    ],
)
def test_what_can_only_be_a_mistake_is_a_fault(cfg: InferenceConfig, found: str) -> None:
    (fault,) = check_rules(cfg).faults
    assert str(fault) == found
    assert fault.fix is not None and fault.fix.drop == (fault.key,)


@pytest.mark.parametrize(
    ("cfg", "found"),
    [
        (
            in_role("decode", disagg__handshake_timeout_s=1.0),
            "disagg.handshake_timeout_s=1.0: has no effect in +role=decode",
        ),
        (
            in_role("prefill", kv_cache__host_bytes=9),
            "kv_cache.host_bytes=9: has no effect in +role=prefill: only a decode role keeps "
            "retracted requests in host memory",
        ),
        (
            in_role("prefill", exe_mode__batch_buckets=[4]),
            "exe_mode.batch_buckets=[4]: has no effect in +role=prefill: it runs no decode batches",
        ),
        (
            in_role("decode", kv_cache__enable_prefix_cache=True),
            "kv_cache.enable_prefix_cache=true: has no effect in +role=decode: it computes no "
            "prompts",
        ),
        (
            in_role("router", model__force_eplb=True, kv_cache__block_size=16),
            "model.force_eplb, kv_cache.block_size: has no effect in +role=router: its instances "
            "have their own",
        ),
        (
            in_role("prefill", disagg__write_timeout_s=3.0),
            "disagg.write_timeout_s=3.0: has no effect with shared memory, whose writes wait for "
            "no connection",
        ),
        (changed(data__top_k=3), "data.top_k=3: has no effect with data.temperature=0 (greedy)"),
        (
            changed(data__seed=3),
            "data.seed=3: has no effect with data.temperature=0 (greedy) and weights from files",
        ),
        (
            changed(data__run_seed=3, data__temperature=1.0, data__seed=1),
            "data.run_seed=3: has no effect unless data.temperature > 0 and data.seed=null",
        ),
        (
            changed(kv_cache__num_blocks=9, kv_cache__mem_fraction=0.5),
            "kv_cache.mem_fraction=0.5: has no effect with kv_cache.num_blocks, which sizes the "
            "pool",
        ),
    ],
)
def test_what_modes_may_share_is_a_warning(cfg: InferenceConfig, found: str) -> None:
    findings = check_rules(cfg)
    assert [str(fault) for fault in findings.faults] == []
    assert [str(warning) for warning in findings.warnings] == [found]


@pytest.mark.parametrize(
    "cfg",
    [
        changed(data__top_k=3, data__temperature=0.5, data__seed=7),
        changed(data__seed=7, model__with_ckpt=False),
        changed(data__run_seed=7, data__temperature=0.5),
        in_role("serve", data__top_k=3, data__seed=3),
        in_role("decode", kv_cache__host_bytes=9, exe_mode__batch_buckets=[4]),
        in_role(
            "cluster", kv_cache__host_bytes=9, disagg__stash_s=3.0, disagg__fence_timeout_s=1.0
        ),
        replace(
            changed(), exe_mode=ExeModeConfig(_target_="x", name="g", enable_static_kernel=True)
        ),
        replace(changed(), platform=PlatformConfig(_target_="inferkit.npu", version="A3")),
    ],
)
def test_what_is_read_is_not_told(cfg: InferenceConfig) -> None:
    assert told(cfg) == []


def test_defaults_are_not_told() -> None:
    assert list(changed_keys(replace(InferenceConfig(), role="serve"))) == []


@pytest.mark.parametrize(
    ("given", "num_experts", "found"),
    [
        (["parallel.moe_tp_size"], 0, ["parallel.moe_tp_size"]),
        (["parallel.moe_tp_size"], 8, []),
        (["parallel"], 0, []),
    ],
)
def test_sizes_of_experts_that_a_model_does_not_have(
    given: list[str], num_experts: int, found: list[str]
) -> None:
    cfg = changed(parallel__world_size=2, parallel__moe_tp_size=2)
    arch = SimpleNamespace(num_experts=num_experts)
    findings = Findings()

    no_effect_of_model(Use(cfg=cfg, resolved=resolve_automatic(cfg), arch=arch), findings, given)

    assert [warning.key for warning in findings.warnings] == found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["kv_cache.host_bytes=1000000", "disagg.stash_s=5.0"], []),
        (["data.limit=1"], ["data.limit"]),
        (['cluster.decode_overrides="disagg.stash_s=5.0"'], ["disagg.stash_s"]),
        (['cluster.prefill_overrides="exe_mode.batch_buckets=[4]"'], ["exe_mode.batch_buckets"]),
    ],
)
def test_a_cluster_hands_a_key_to_the_half_that_reads_it(
    space: ConfigSpace, words: list[str], found: list[str]
) -> None:
    checked = Checker(space).check_overrides([*TINY, "data.seed=1", "+role=cluster", *words])

    assert [str(fault) for fault in checked.faults] == []
    assert [warning.key for warning in checked.warnings] == found


def test_a_key_of_one_role_asks_for_the_role() -> None:
    (fault,) = check_rules(changed(cluster__prefill=2)).faults
    assert str(fault) == "cluster.prefill=2: has no effect without a role; choose +role=cluster"
    assert fault.fix is not None and fault.fix.add == ("+role=cluster",)


def test_cells_of_a_sweep_are_warned_of_a_key_once(space: ConfigSpace) -> None:
    words = (*TINY, "kv_cache.num_blocks=99", "kv_cache.mem_fraction=0.5,0.6,0.7")
    (warning,) = preflight(Command(flags=("-m",), overrides=words), space).warnings
    assert str(warning) == (
        "kv_cache.mem_fraction: has no effect with kv_cache.num_blocks, which sizes the pool"
    )


def test_a_single_run_reads_nothing_of_sweeps(space: ConfigSpace) -> None:
    words: tuple[Any, ...] = (*TINY, "sweep.on_failure=stop")
    (warning,) = preflight(Command(overrides=words), space).warnings
    assert str(warning) == (
        "sweep.on_failure=stop: has no effect in a single run; -m makes a sweep, as of "
        "scheduler.batch_size=1,2"
    )
    assert preflight(Command(flags=("-m",), overrides=words), space).warnings == ()
