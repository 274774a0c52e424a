"""Rules of the `parallel` node, and its options against the formula of their names."""

import re
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.faults import Command
from inferkit.config.parallel_rules import sizes_named
from inferkit.config.preflight import preflight
from inferkit.config.rules import check_rules
from inferkit.config.schema import ParallelConfig
from inferkit.config.space import ConfigSpace
from inferkit.core.parallel_layout import TP_SIZES
from tests.config.configs import changed, faults, warnings

OPTIONS = (
    *(f"tp{n}" for n in (1, 2, 4, 8, 16, 32)),
    *(f"dp{n}" for n in (2, 4, 8, 16, 32, 128)),
    *("dp2tp2", "dp2tp4", "dp2tp8", "dp2tp16", "dp4tp2", "dp4tp4", "dp4tp8", "dp8tp2", "dp8tp4"),
    *(f"ep{n}" for n in (2, 4, 8, 16, 32, 128)),
    *(f"cp{n}" for n in (2, 4, 8, 16)),
)


def named(option: str) -> ParallelConfig:
    """What the name of an option promises."""
    sizes = {kind: int(n) for kind, n in re.findall(r"([a-z]+)(\d+)", option)}
    tp_size = sizes.get("tp", sizes.get("ep", 1))
    tp_sizes: dict[str, Any] = {f"{kind}_tp_size": tp_size for kind in TP_SIZES}
    if sizes.keys() != {"tp"}:
        tp_sizes["moe_tp_size"] = 1
    world_size = sizes.get("dp", 1) * tp_size * sizes.get("cp", 1)
    return ParallelConfig(world_size=world_size, cp_size=sizes.get("cp", 1), **tp_sizes)


def test_options_are_all_there(space: ConfigSpace) -> None:
    assert sorted(space.options("parallel")) == sorted(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_what_its_name_says(checker: Checker, option: str) -> None:
    config = checker.check_overrides([f"parallel={option}"]).config

    assert config is not None
    assert config.parallel == named(option)


@pytest.mark.parametrize("option", [*OPTIONS, "tp3", "dp3tp5", "ep6", "cp7"])
def test_sizes_are_told_from_the_name_of_an_option(option: str) -> None:
    assert ParallelConfig(**sizes_named(option)) == named(option)


@pytest.mark.parametrize(
    "option", ["tp", "tp0", "xp2", "tp2dp2", "tp2x", "ep2tp2", "1", "tp1000000"]
)
def test_other_names_tell_no_sizes(option: str) -> None:
    assert sizes_named(option) == {}


def test_a_size_of_the_users_own_stays_where_an_option_has_no_file(space: ConfigSpace) -> None:
    assert works(space, "parallel=dp3tp2", "parallel.moe_tp_size=2", "data.limit=3") == (
        "parallel.world_size=6 parallel.attn_tp_size=2 parallel.embed_tp_size=2 "
        "parallel.lmhead_tp_size=2 parallel.dense_tp_size=2 parallel.shared_tp_size=2 "
        "parallel.o_proj_tp_size=2 parallel.moe_tp_size=2 data.limit=3"
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_warns_about_a_dense_model(checker: Checker, option: str) -> None:
    # A size that a dense model has no use for is part of the option, not a wish of the user.
    overrides = [f"parallel={option}", "scheduler.batch_size=128"]

    assert checker.check_overrides(overrides).warnings == ()


@pytest.mark.parametrize("size", [0, -1, 7])
def test_a_broken_size_breaks_no_other_rule(size: int) -> None:
    found = check_rules(changed(parallel__attn_tp_size=size, scheduler__batch_size=8)).faults

    assert [fault.key for fault in found] == ["parallel.attn_tp_size"]


def test_a_size_that_does_not_divide_names_both_numbers() -> None:
    assert faults(parallel__world_size=8, parallel__dense_tp_size=3) == [
        "parallel.dense_tp_size=3: does not divide world_size=8; allowed is 1, 2, 4, 8; or set "
        "parallel.world_size to a multiple of 3"
    ]


def works(space: ConfigSpace, *overrides: str) -> str:
    """The overrides that the message of a refused command proposes."""
    verdict = preflight(Command(overrides=overrides), space)
    return verdict.message.partition("this works:\n  python -m inferkit ")[2]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # One share too many: the nearest that divides.
        ("parallel=tp4 parallel.o_proj_tp_size=3", "parallel=tp4 parallel.o_proj_tp_size=2"),
        # More shares than ranks: the ranks were forgotten.
        ("parallel.attn_tp_size=2", "parallel.attn_tp_size=2 parallel.world_size=2"),
        # All sizes but one agree: that one is wrong.
        ("parallel=tp4 parallel.world_size=6", "parallel=tp4 parallel.world_size=4"),
        ("parallel=tp4 parallel.world_size=0", "parallel=tp4 parallel.world_size=4"),
        ("parallel=tp4 parallel.moe_tp_size=0", "parallel=tp4 parallel.moe_tp_size=1"),
        (
            "parallel.world_size=6 parallel.attn_tp_size=2 parallel.dense_tp_size=3",
            "parallel.world_size=6 parallel.attn_tp_size=2 parallel.dense_tp_size=2",
        ),
        ("parallel=dp4 parallel.cp_size=2", "parallel=dp4 parallel.cp_size=4"),
        ("parallel=cp4 parallel.attn_tp_size=2", "parallel=cp4 parallel.attn_tp_size=1"),
    ],
)
def test_a_command_that_works_is_shown(space: ConfigSpace, overrides: str, expected: str) -> None:
    assert works(space, *overrides.split()) == expected


def test_a_world_beyond_all_bounds_is_refused_at_once(space: ConfigSpace) -> None:
    assert faults(parallel__world_size=65536) == []
    assert faults(parallel__world_size=1_000_000_000) == [
        "parallel.world_size=1000000000: is out of range; allowed is 1 to 65536"
    ]
    assert works(space, "parallel.world_size=1000000000", "data.limit=3") == "data.limit=3"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"world_size": 16, "node_ips": ["a", "b"], "master_port": 1},
            "parallel.devices_per_node=0: world_size=16 is 8 on each of the 2 nodes of "
            "parallel.node_ips; allowed is 8",
        ),
        (
            {"world_size": 16, "node_ips": ["a", "b"], "devices_per_node": 4, "master_port": 1},
            "parallel.devices_per_node=4: world_size=16 is 8 on each of the 2 nodes of "
            "parallel.node_ips; allowed is 8",
        ),
        (
            {"world_size": 3, "node_ips": ["a", "b"], "devices_per_node": 2, "master_port": 1},
            "parallel.world_size=3: ranks do not divide among the 2 nodes of parallel.node_ips; "
            "allowed is a multiple of 2, or another number of nodes",
        ),
        (
            {"world_size": 2, "devices_per_node": 8},
            "parallel.devices_per_node=8: is more than world_size=2; allowed is 2, or 0 (all on "
            "this node)",
        ),
        (
            {"world_size": 16, "devices_per_node": 8, "node_ips": ["a"]},
            "parallel.devices_per_node=8: world_size=16 takes 2 nodes of 8 ranks: list their "
            "addresses in parallel.node_ips, the master first; allowed is 16, or 0 (all on this "
            "node)",
        ),
        (
            {"devices_per_node": -1},
            "parallel.devices_per_node=-1: is out of range; allowed is 0 (all on this node) "
            "or >= 1",
        ),
        (
            {"world_size": 2, "node_ips": ["a", "a"], "devices_per_node": 1, "master_port": 1},
            "parallel.node_ips=[a,a]: must name every node once, the master first",
        ),
        (
            {"world_size": 2, "master_port": 65536},
            "parallel.master_port=65536: is out of range; allowed is 0 (a free one is chosen) "
            "to 65535",
        ),
        (
            {"world_size": 2, "node_ips": ["a", "b"], "devices_per_node": 1},
            "parallel.master_port=0: several nodes cannot choose a free port together; set one "
            "that is free on a",
        ),
    ],
)
def test_nodes(values: dict[str, Any], fault: str) -> None:
    assert faults(**{f"parallel__{name}": value for name, value in values.items()}) == [fault]


def test_nodes_that_are_all_there() -> None:
    two = {"node_ips": ["a", "b"], "devices_per_node": 8, "master_port": 29500, "world_size": 16}

    assert faults(**{f"parallel__{name}": value for name, value in two.items()}) == []
    assert faults(parallel__node_ips=["a"], parallel__world_size=4) == []
    assert faults(parallel__devices_per_node=4, parallel__world_size=4) == []


def test_a_command_that_works_is_shown_for_nodes(space: ConfigSpace) -> None:
    two = ("parallel=tp16", "parallel.node_ips=[a,b]")

    assert works(space, *two) == (
        "parallel=tp16 'parallel.node_ips=[a,b]' parallel.devices_per_node=8 "
        "parallel.master_port=29500"
    )


def test_one_rank_needs_no_port() -> None:
    assert warnings(parallel__master_port=29500) == [
        "parallel.master_port=29500: has no effect with one rank, which meets no other"
    ]


def test_context_parallelism_has_no_prefix_cache(space: ConfigSpace) -> None:
    cp4 = {"parallel__world_size": 4, "parallel__cp_size": 4}

    assert faults(**cp4, kv_cache__enable_prefix_cache=True) == [
        "kv_cache.enable_prefix_cache=true: is not available with context parallelism "
        "(parallel.cp_size=4)"
    ]
    assert works(space, "parallel=cp4", "kv_cache.enable_prefix_cache=true") == (
        "parallel=cp4 kv_cache.enable_prefix_cache=false"
    )
